"""Planted faults in elastic fits: hangs, lost steps, ranks that differ, samples read twice, and
what is left behind.

    python benchmarks/chaos.py --faults 100 --seed 0 --json

Each job is a Trainer's fit of 2 to 6 ranks, with a batch norm, an optimizer with state, a schedule,
validation, checkpoints, and sometimes accumulated batches, loader processes or sharded optimizers,
over shared memory or Gloo. It runs under this package's launcher and agents, on this host or on two
or three network namespaces. A seed decides about everything: what fails at which step, where in it,
whether others replace it.

- Ranks are killed, exit, are stopped, or run out of memory (a cgroup).
- Links are cut, and mended or not; hosts fail; agents, and the launcher, which is the steward, die
  or are stopped for seconds.
- The disk of checkpoints and logs is full, or /dev/shm.

A job ends with its training finished, or says why not: the steward died, a disk is full, or, with
sharded optimizers, both ranks that held a shard have died and there was no checkpoint yet. Hosts,
full disks and memory limits take Linux and root; elsewhere such jobs are left out. The exit code is
1 if any job went wrong; its seed is printed, its files are kept, and ``--seed SEED --faults 1``
runs it again. Files of a job that stood still for ten seconds are kept too, and ``NUMBER.stacks``
shows where its ranks were.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import chaos_host
from benchmarks.chaos_checks import Outcome
from benchmarks.chaos_job import SLOW_SECONDS, Job
from benchmarks.chaos_plan import Plan, draw
from benchmarks.chaos_rank import fit
from benchmarks.hosts import open_hosts, why_not

_DISK_MIB = 1
_SHM_MIB = 16


@dataclass(slots=True)
class Result:
    """What became of a job. ``faults`` were carried out; ``wrong`` says what is wrong, in words."""

    plan: Plan
    faults: list[list[str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    joined: int = 0
    finished: bool = False
    lost: bool = False
    new_starts: int = 0
    seconds: float = 0.0
    standstill: float = 0.0


def run_job(plan: Plan, *, mounts: bool) -> Result:
    """``mounts``: whether this process may make some, for small disks."""
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    with contextlib.ExitStack() as surroundings:
        surroundings.callback(shutil.rmtree, folder, ignore_errors=True)
        surroundings.callback(chaos_host.remove_groups)
        (folder / "disk").mkdir()
        if mounts:
            surroundings.enter_context(chaos_host.small_disk(folder / "disk", _DISK_MIB))
            surroundings.enter_context(chaos_host.small_disk(Path("/dev/shm"), _SHM_MIB))
        before = set(os.listdir("/dev/shm"))
        hosts = (
            surroundings.enter_context(open_hosts(plan.hosts, rate=None)) if plan.hosts else None
        )
        job = Job(plan, folder, lambda number: fit(folder, number, plan), hosts)
        job.run()
        outcome = Outcome(job)
        result = Result(
            plan, outcome.faults, outcome.wrong, outcome.joined, outcome.finished, outcome.lost
        )
        result.new_starts, result.standstill = outcome.new_starts, job.standstill
        new = set(os.listdir("/dev/shm")) - {*before, chaos_host.FILLER}
        if "shm" in (kind for *_, kind in outcome.faults):
            # torch's, of a loader that found it full
            new = {name for name in new if not name.startswith("torch_")}
        if new := {name for name in new if mounts or name.startswith("lightning")}:
            result.wrong.append(f"left in /dev/shm: {sorted(new)}")
        if result.wrong or result.standstill > SLOW_SECONDS:
            kept = (
                Path(tempfile.gettempdir())
                / f"chaos-{'failed' if result.wrong else 'slow'}-{plan.seed}"
            )
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(
                folder, kept, ignore=shutil.ignore_patterns("ssh", "tmp", chaos_host.FILLER)
            )
    result.seconds = time.monotonic() - began
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--faults", type=int, default=20, help="jobs run until so many faults were carried out"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first job; the next ones have the next numbers"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="no job starts after so many"
    )
    parser.add_argument(
        "--json", action="store_true", help="the summary on one line, and no line for each job"
    )
    options = parser.parse_args()
    mounts, no_hosts = chaos_host.own_mounts(), why_not()
    if no_hosts is not None:
        print(f"jobs on several hosts are left out: {no_hosts}", file=sys.stderr)
    results: list[Result] = []
    seed, until = options.seed, time.monotonic() + options.seconds
    while (
        sum(len(result.faults) for result in results) < options.faults and time.monotonic() < until
    ):
        plan = draw(seed)
        seed += 1
        if seed - options.seed > 10 + 3 * options.faults:
            raise SystemExit("hardly any fault was carried out: see what is wrong with these jobs")
        if plan.hosts and no_hosts is not None:
            continue
        result = run_job(plan, mounts=mounts)
        results.append(result)
        if not options.json or result.wrong:
            faults = ", ".join(" ".join(fault) for fault in result.faults)
            times = f"{result.seconds:.1f} s, the longest standstill {result.standstill:.1f} s"
            print(f"seed {result.plan.seed}: {faults or 'no fault'}, {times}", file=sys.stderr)
            for line in result.wrong:
                print(f"  WRONG: {line}", file=sys.stderr)
    kinds = Counter(" ".join(fault[2:]) for result in results for fault in result.faults)
    summary = {
        "seeds": [options.seed, seed - 1],
        "jobs": len(results),
        "faults": sum(kinds.values()),
        "finished": sum(result.finished for result in results),
        "joined": sum(result.joined for result in results),
        "lost_shards": sum(result.lost for result in results),
        "new_starts": sum(result.new_starts for result in results),
        "longest_standstill": max(
            (round(result.standstill, 1), result.plan.seed) for result in results
        ),
        "wrong": {result.plan.seed: result.wrong for result in results if result.wrong},
        "by_kind": dict(Counter(fault[3] for result in results for fault in result.faults)),
        "by_place_and_kind": dict(sorted(kinds.items())),
        "plans_of_failures": [asdict(result.plan) for result in results if result.wrong],
    }
    print(json.dumps(summary, indent=None if options.json else 2))
    return 1 if summary["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
