"""Times a training step under Lightning's DDP and under lightning_ring, and prints ratios.

``python -m benchmarks.step one_node``. Every strategy is a job of its own, really trained through
`L.Trainer` on the same module and the same random batch; the jobs take turns
(`benchmarks/turns.py`), some steps each, round after round. A step lasts from one
``training_step`` to the next, in the mean of the ranks. ``alone`` is the same loop on as many
ranks without communication: what is left when communication costs nothing. ``keep_freed_memory`` is
ring's default, and the limit is taken with it.

Rows with hosts need Linux and root: they make network namespaces with links of limited rate
(`tests/hosts.py`).
"""

import contextlib
import json
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.turns import Conductor, parser_of, prepare
from lightning_ring.job.rendezvous.greeting import reserve_port
from tests import hosts


@dataclass(frozen=True)
class Row:
    """The first of ``contenders`` is the peer of the others."""

    model: str
    contenders: tuple[str, ...]
    ranks: int = 2
    num_hosts: int = 1
    rate: str = "1gbit"
    steps: int = 4  # a turn
    rounds: int = 8
    start: str = "fork"  # "exec": one process a job; "ringrun"
    options: tuple[str, ...] = ()  # of `benchmarks.step.rank`
    by_turn: bool = False  # compare means of turns, where not every step costs the same


_ALONE = "alone:keep_freed_memory=True"
_TRACED = f"ring:timeline={tempfile.gettempdir()}/ring-step-trace.json"
_WITH_ALONE = ("ddp", "ring", _ALONE)
_SHARDED_TOO = ("ddp", "ring", "ring_sharded", _ALONE)
_AS_AUTO = ("auto", "ring:keep_freed_memory=False", "ring")
_MONITORED = ("ring:monitor=False", "ring", _TRACED)
# A loader with a sampler, which an elastic job needs; it has a launcher that outlives its ranks.
_SAMPLED = {"start": "ringrun", "options": ("--logger", "--sampled", "--batch", "4")}
# Of 50 steps one is logged.
_LOGGED = Row("resnet18", _MONITORED, steps=50, options=("--logger",), by_turn=True)

ROWS = {
    "one_node": Row("resnet18", _WITH_ALONE),
    "two_hosts": Row("resnet18", _SHARDED_TOO, num_hosts=2, steps=3, rounds=5),
    "two_hosts_bf16": Row("resnet18", ("ddp", "ring:compression=bf16", _ALONE), num_hosts=2),
    "four_ranks": Row("resnet18", ("ddp", "ring"), ranks=4, num_hosts=2, steps=2, rounds=5),
    "small_two_hosts": Row("small", _WITH_ALONE, num_hosts=2, rate="10gbit", steps=50),
    "many_small": Row("many_small", _WITH_ALONE, steps=40),
    "one_process": Row("resnet18", _AS_AUTO, ranks=1, steps=5, rounds=16, by_turn=True),
    "monitor": _LOGGED,
    "elastic": replace(_LOGGED, contenders=("ring", "ring_elastic"), rounds=12, **_SAMPLED),
    "state": Row("resnet18", ("ring", "ring_sharded"), steps=2, rounds=2),
}
# Until this process ends, the ports of its jobs are given to nobody.
_RESERVED = []


def measure(row, options=()):
    """Seconds of every step by contender, and what its ranks say of themselves. ``options`` are
    those of `benchmarks.step.rank`.
    """
    prepare()
    seconds = {name: [] for name in row.contenders}
    with (
        tempfile.TemporaryDirectory() as folder,
        commands(row, options) as started,
        Conductor(Path(folder)) as conductor,
    ):
        conductor.open(started, row.contenders, row.ranks)
        for number in range(row.rounds + 1):
            first = number % len(row.contenders)
            for name in row.contenders[first:] + row.contenders[:first]:
                times = conductor.turn(name, row.steps)
                if number > 0:  # the first turn makes connections, plans and optimizer state
                    seconds[name] += times
        return seconds, conductor.finish()


@contextlib.contextmanager
def commands(row, options):
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
            reserved = {name: reserve_port() for name in row.contenders}
            _RESERVED.extend(reserved.values())
            ports = {name: one.getsockname()[1] for name, one in reserved.items()}
            job = {"jobs": ports, "arguments": arguments, "ranks": row.ranks}
            job |= {"hosts": len(addresses), "master": addresses[0]}
            fork = [*python, "benchmarks.step.rank", "--fork", json.dumps(job)]
            if opened is None:
                yield [[*fork, "0"]]
                return
            gloo = ["env", f"GLOO_SOCKET_IFNAME={hosts.INTERFACE}"]
            yield [opened.on(name, *gloo, *fork, str(n)) for n, name in enumerate(opened.names)]


def report(row, seconds, facts):
    where = f"{row.num_hosts} hosts at {row.rate}" if row.num_hosts > 1 else "one node"
    yield f"\n{row.model}, {row.ranks} rank(s), {where}, {row.rounds} turns of {row.steps} steps\n"
    yield "| strategy | ms a step, median | optimizer state, MB a rank |\n|---|---|---|"
    for name, times in seconds.items():
        state = max(fact["state_bytes"] for fact in facts[name]) / 1e6
        yield f"| {name} | {1e3 * statistics.median(times):.1f} | {state:.1f} |"
    yield ""
    peer = row.contenders[0]
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for ours in row.contenders[1:]:
        ratio = medians[ours] / medians[peer]
        mine, theirs = (max(fact["state_bytes"] for fact in facts[name]) for name in (ours, peer))
        state = f", {mine / theirs:.3f} of its optimizer state" if theirs else ""
        yield f"- {ours}: {ratio:.3f} of the time of {peer}{state}"
        if _ALONE in medians and ours != _ALONE:
            exposed, of_peer = (1e3 * (medians[name] - medians[_ALONE]) for name in (ours, peer))
            yield f"  communication exposed: {exposed:.1f} ms, {exposed / of_peer:.2f} of {peer}'s"
        if row.by_turn:
            middle, low, high = ratio_of_turns(seconds[ours], seconds[peer], row.steps)
            yield f"  by means of turns {middle:.4f}, 95 % of medians {low:.4f} to {high:.4f}"


def ratio_of_turns(ours, peer, steps):
    """Median over turns of the ratio of the turns' means, and where 95 % of the medians of
    resampled turns lie.
    """
    ratios = [
        sum(ours[at : at + steps]) / sum(peer[at : at + steps]) for at in range(0, len(ours), steps)
    ]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), medians[50], medians[1949]


def main():
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("row", choices=ROWS, help="one row of the table in docs/performance.md")
    add("--contenders", nargs="+", help="others than the row's, such as ring:bucket_cap_mb=4")
    add("--model", choices=("resnet18", "resnet50", "many_small", "small", "tiny"))
    add("--rate", help="of the links between hosts, as tc writes it")
    add("--steps", type=int, help="a turn")
    add("--rounds", type=int)
    add("--json", metavar="FILE", help="write every step's seconds")
    asked = parser.parse_args()
    names = ("model", "rate", "steps", "rounds")
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
        Path(asked.json).write_text(json.dumps({"seconds": seconds, "facts": facts}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
