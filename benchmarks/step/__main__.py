"""Times a training step under Lightning's DDP and under lightning_ring, and prints ratios.

``python -m benchmarks.step one_node``. Every strategy is a job of its own, really trained through
`L.Trainer` on the same module and the same random batch; the jobs take turns
(`benchmarks/turns.py`), some steps each, round after round. A step lasts from one
``on_train_batch_start`` to the next, on the slowest rank. ``alone`` is the same loop on as many
ranks without communication: what is left when communication costs nothing. ``keep_freed_memory`` is
ring's default, and the limit is taken with it.

Rows with hosts need Linux and root: they make network namespaces with links of limited rate
(`benchmarks/hosts.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import hosts
from benchmarks.step import forked
from benchmarks.turns import Conductor, prepare


@dataclass(frozen=True)
class Row:
    """``asked``: ours, the peer, and the share of the peer's time that is asked for, at most."""

    model: str
    contenders: tuple[str, ...]
    asked: tuple[tuple[str, str, float], ...] = ()
    ranks: int = 2
    num_hosts: int = 1
    rate: str = "1gbit"
    asked_state: tuple[tuple[str, str, float], ...] = ()
    steps: int = 4  # a turn
    rounds: int = 8
    start: str = "fork"  # "exec": one process a job; "ringrun"
    options: tuple[str, ...] = ()  # of `step_rank`
    by_turn: bool = False  # compare means of turns, where not every step costs the same


_ALONE = "alone:keep_freed_memory=True"
_TRACED = f"ring:timeline={tempfile.gettempdir()}/ring-step-trace.json"

ROWS = {
    "one_node": Row("resnet18", ("ddp", "ring", _ALONE), (("ring", "ddp", 0.88),)),
    "two_hosts": Row(
        "resnet18",
        ("ddp", "ring", "ring_sharded", _ALONE),
        (("ring", "ddp", 0.98), ("ring_sharded", "ddp", 0.92)),
        num_hosts=2,
        steps=3,
        rounds=5,
    ),
    "two_hosts_bf16": Row(
        "resnet18",
        ("ddp", "ring:compression=bf16"),
        (("ring:compression=bf16", "ddp", 0.65),),
        num_hosts=2,
    ),
    "four_ranks": Row(
        "resnet18",
        ("ddp", "ring"),
        (("ring", "ddp", 0.50),),
        ranks=4,
        num_hosts=2,
        steps=2,
        rounds=5,
    ),
    "many_small": Row("many_small", ("ddp", "ring", _ALONE), (("ring", "ddp", 0.8),), steps=40),
    "one_process": Row(
        "resnet18",
        ("auto", "ring:keep_freed_memory=False", "ring"),
        (("ring:keep_freed_memory=False", "auto", 1.01), ("ring", "auto", 1.01)),
        ranks=1,
        steps=5,
        rounds=16,
        by_turn=True,
    ),
    "monitor": Row(
        "resnet18",
        ("ring:monitor=False", "ring", _TRACED),
        (("ring", "ring:monitor=False", 1.01), (_TRACED, "ring:monitor=False", 1.01)),
        steps=50,  # of which one is logged
        options=("--logger",),
        by_turn=True,
    ),
    "elastic": Row(
        "resnet18",
        ("ring", "ring_elastic"),
        (("ring_elastic", "ring", 1.01),),
        steps=50,
        rounds=12,
        start="ringrun",  # an elastic job has a launcher that outlives its ranks
        options=("--logger", "--sampled", "--batch", "4"),
        by_turn=True,
    ),
    "state": Row(
        "resnet18",
        ("ring", "ring_sharded"),
        asked_state=(("ring_sharded", "ring", 0.55),),
        steps=2,
        rounds=2,
    ),
}


def measure(
    row: Row, options: Sequence[str] = ()
) -> tuple[dict[str, list[float]], dict[str, list[Any]]]:
    """Seconds of every step by contender, and what its ranks say of themselves. ``options`` go
    to `step_rank`.
    """
    prepare()
    seconds: dict[str, list[float]] = {name: [] for name in row.contenders}
    with (
        tempfile.TemporaryDirectory() as folder,
        commands(row, options) as started,
        Conductor(Path(folder)) as conductor,
    ):
        conductor.start(started, row.contenders, row.ranks)
        for number in range(row.rounds + 1):
            first = number % len(row.contenders)
            for name in row.contenders[first:] + row.contenders[:first]:
                times = conductor.turn(name, row.steps)
                if number > 0:  # the first turn makes connections, plans and optimizer state
                    seconds[name] += times
        return seconds, conductor.finish()


@contextlib.contextmanager
def commands(row: Row, options: Sequence[str]) -> Iterator[list[list[str]]]:
    """What to run: a process a host that forks the ranks of all jobs, or a command for each job."""
    python, arguments = [sys.executable, "-m"], [row.model, *row.options, *options]
    each = [[*python, "benchmarks.step.rank", *arguments, name] for name in row.contenders]
    with contextlib.ExitStack() as stack:
        opened = None
        if row.num_hosts > 1:
            opened = stack.enter_context(hosts.open_hosts(row.num_hosts, row.rate))
        if row.start == "exec":
            yield each
        elif row.start == "ringrun":
            run = [*python, "lightning_ring.cli.ringrun", "-n", str(row.ranks)]
            elastic, plain = ["--min-ranks", "1"], ["--no-mpi"]
            yield [
                [*run, *(elastic if name == "ring_elastic" else plain), *command]
                for name, command in zip(row.contenders, each, strict=True)
            ]
        else:
            addresses = ["127.0.0.1"]
            if opened is not None:
                addresses = [opened.address(name) for name in opened.names]
            plan = forked.plan(row.contenders, arguments, row.ranks, addresses)
            fork = [*python, "benchmarks.step.forked", plan]
            if opened is None:
                yield [[*fork, "0"]]
                return
            gloo = ["env", f"GLOO_SOCKET_IFNAME={hosts.INTERFACE}"]
            yield [opened.on(name, *gloo, *fork, str(n)) for n, name in enumerate(opened.names)]


def report(row: Row, seconds: dict[str, list[float]], facts: dict[str, list[Any]]) -> Iterator[str]:
    where = f"{row.num_hosts} hosts at {row.rate}" if row.num_hosts > 1 else "one node"
    yield f"\n{row.model}, {row.ranks} rank(s), {where}, {row.rounds} turns of {row.steps} steps\n"
    yield "| strategy | ms a step, median | least | p95 | optimizer state, MB a rank |"
    yield "|---|---|---|---|---|"
    for name, times in seconds.items():
        p95 = sorted(times)[int(0.95 * len(times))]
        state = max(fact["state_bytes"] for fact in facts[name]) / 1e6
        numbers = [1e3 * statistics.median(times), 1e3 * min(times), 1e3 * p95, state]
        yield f"| {name} | " + " | ".join(f"{number:.1f}" for number in numbers) + " |"
    yield ""
    asked = {(ours, peer): f"; asked: at most {limit:.2f}" for ours, peer, limit in row.asked}
    peer = row.contenders[0]
    for ours in row.contenders[1:]:
        ratio = statistics.median(seconds[ours]) / statistics.median(seconds[peer])
        yield f"- {ours}: {ratio:.3f} of the time of {peer}{asked.get((ours, peer), '')}"
        if row.by_turn:
            middle, low, high = ratio_of_turns(seconds[ours], seconds[peer], row.steps)
            yield f"  by means of turns {middle:.4f}, 95 % of medians {low:.4f} to {high:.4f}"
    for ours, peer, limit in row.asked_state:
        mine, theirs = (max(fact["state_bytes"] for fact in facts[name]) for name in (ours, peer))
        share = f"{mine / theirs:.3f} of the optimizer state of {peer}"
        yield f"- {ours}: {share}; asked: at most {limit:.2f}"


def ratio_of_turns(
    ours: Sequence[float], peer: Sequence[float], steps: int
) -> tuple[float, float, float]:
    """Median over turns of the ratio of the turns' means, and where 95 % of the medians of
    resampled turns lie.
    """
    ratios = [
        sum(ours[at : at + steps]) / sum(peer[at : at + steps]) for at in range(0, len(ours), steps)
    ]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), medians[50], medians[1949]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("row", choices=ROWS, help="one row of the table in docs/performance.md")
    add("--contenders", nargs="+", help="others than the row's, such as ring:bucket_cap_mb=4")
    add("--model", choices=("resnet18", "resnet50", "many_small", "tiny"))
    add("--ranks", type=int, help="in all, round-robin over the hosts")
    add("--hosts", dest="num_hosts", type=int)
    add("--rate", help="of the links between hosts, as tc writes it")
    add("--steps", type=int, help="a turn")
    add("--rounds", type=int)
    add("--json", metavar="FILE", help="write every step's seconds")
    asked = parser.parse_args()
    names = ("model", "ranks", "num_hosts", "rate", "steps", "rounds")
    given = {name: getattr(asked, name) for name in names if getattr(asked, name) is not None}
    row = replace(ROWS[asked.row], **given)
    if asked.contenders:
        row = replace(row, contenders=tuple(asked.contenders))
    if row.num_hosts > 1 and (reason := hosts.why_not()) is not None:
        print(f"no hosts: {reason}", file=sys.stderr)
        return 77
    seconds, facts = measure(row)
    print(*report(row, seconds, facts), sep="\n", flush=True)
    if asked.json is not None:
        found = {"row": asdict(row), "seconds": seconds, "facts": facts}
        Path(asked.json).write_text(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
