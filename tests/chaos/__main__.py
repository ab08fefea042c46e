"""Planted faults in elastic fits: hangs, lost steps, ranks that differ, samples read twice, and
what is left behind.

    python -m tests.chaos --faults 100 --seed 0

Each job is a Trainer's fit of 2 to 6 ranks, with a batch norm, an optimizer with state, a schedule,
validation, checkpoints, and sometimes accumulated batches, loader processes, sharded optimizers or
more of Lightning's callbacks, over shared memory or Gloo. It runs under this package's launcher and
agents, on this host or on two or three network namespaces. A seed decides about everything: what
fails at which step, where in it, whether others replace it.

- Ranks are killed, exit, are stopped, or run out of memory (a cgroup).
- Links are cut, and mended or not; hosts fail; agents, and the launcher, which is the steward, die
  or are stopped for seconds.
- The disk of checkpoints and logs is full, or /dev/shm.

A job ends with its training finished, or says why not: the steward died, a disk is full, or, with
sharded optimizers, both ranks that held a shard have died and there was no checkpoint yet. Else all
ranks go back to the newest one: steps after it are done again, and count once. Hosts,
full disks and memory limits take Linux and root; elsewhere such jobs are left out. The exit code is
1 if any job went wrong; its seed is printed, its files are kept, and ``--seed SEED --faults 1``
runs it again. Files of a job that stood still for ten seconds are kept too, and ``NUMBER.stacks``
shows where its ranks were.
"""

import argparse
import json
import sys
from collections import Counter

from tests.chaos import host as chaos_host
from tests.chaos.plan import draw
from tests.chaos.run import run_job
from tests.hosts import why_not


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--faults", type=int, default=20, help="jobs run until so many faults were carried out"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first job; the next ones have the next numbers"
    )
    options = parser.parse_args()
    mounts, no_hosts = chaos_host.own_mounts(), why_not()
    if no_hosts is not None:
        print(f"jobs on several hosts are left out: {no_hosts}", file=sys.stderr)
    results = []
    seed = options.seed
    while sum(len(result.faults) for result in results) < options.faults:
        plan = draw(seed)
        seed += 1
        if seed - options.seed > 10 + 3 * options.faults:
            raise SystemExit("hardly any fault was carried out: see what is wrong with these jobs")
        if plan.hosts and no_hosts is not None:
            continue
        result = run_job(plan, mounts=mounts)
        results.append(result)
        faults = ", ".join(" ".join(fault) for fault in result.faults)
        came = f"{result.joined} joined, {result.returns} returns"
        line = f"{plan}: {faults or 'no fault'}, {came}, stood still {result.standstill:.1f} s"
        print(line, *result.wrong, sep="\n  WRONG: ", file=sys.stderr)
    kinds = Counter(" ".join(fault[2:]) for result in results for fault in result.faults)
    summary = {
        "seeds": [options.seed, seed - 1],
        "jobs": len(results),
        "faults": kinds.total(),
        **{
            name: sum(getattr(result, name) for result in results)
            for name in ("finished", "joined", "lost", "returns")
        },
        "longest_standstill": max((result.standstill, result.plan.seed) for result in results),
        "wrong": {result.plan.seed: result.wrong for result in results if result.wrong},
        "by_place_and_kind": dict(sorted(kinds.items())),
    }
    print(json.dumps(summary))
    return 1 if summary["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
