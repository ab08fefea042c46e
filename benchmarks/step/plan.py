"""Holds `lightning-ring plan` against runs: what it predicts for 2, 3 and 4 hosts, and what a step
takes there.

    sudo python -m benchmarks.step.plan  # 2, 3 and 4 hosts at two link speeds, 3 minutes

1. One rank trains ResNet-18 and records a profile (`RingProfile`), unless --profile names one.
2. At each speed `lightning-ring bench` measures the link between two hosts, and once the memory
   that two ranks share.
3. From these two the model predicts every row; nothing is fitted to the rows themselves.
4. Ranks on the hosts replay the step: sleeps instead of computation, which two cores cannot do for
   four hosts, and the real reducer, sharding and communicators (`benchmarks.step.plan_rank`).

needs Linux, root, ip and tc: the hosts are network namespaces (`benchmarks.hosts`). The exit code
is 1 where an error is above --tolerance.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.hosts import Hosts, mpirun_path, open_hosts, why_not
from benchmarks.turns import prepare
from lightning_ring.tools.plan.inputs import read_bench, read_profile
from lightning_ring.tools.plan.model import Cluster, Link, Settings, predict

_SIZES = "64K,256K,512K,1M,4M,16M"
_SECONDS = 200
# what runs on the hosts: topology, ranks a host, strategies
_LAYOUTS = {"flat": ("flat", 1), "hierarchical": ("hierarchical", 2)}
WAYS = {
    "ring": Settings(),
    "ring_sharded": Settings(sharded=True),
    "bf16": Settings(sixteen_bits=True),
    "local_sgd_8": Settings(local_steps=8),
}


@dataclass(frozen=True, slots=True)
class Row:
    rate: str
    num_hosts: int
    ranks_per_host: int
    way: str
    predicted: float
    measured: float
    processor: float  # seconds of all cores together, in a measured step

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def check(asked: argparse.Namespace, folder: Path) -> Iterator[Row]:
    path, seconds = Path(asked.profile or record(folder)), asked.bench_seconds
    node = measure_link(folder, seconds, None) if "hierarchical" in asked.layouts else None
    for rate in asked.rates:
        with open_hosts(2, rate) as hosts:
            network = measure_link(folder, seconds, hosts)
        for num_hosts in asked.hosts:
            with open_hosts(num_hosts, rate) as hosts:
                for layout in [name for name in asked.layouts if name == "flat" or num_hosts == 2]:
                    links = network, node or network
                    yield from measure(hosts, rate, layout, path, links, asked, folder)


def in_words(row: Row) -> str:
    where = f"{row.rate:>9} {row.num_hosts:>6} {row.num_hosts * row.ranks_per_host:>6}"
    times = f"{1e3 * row.predicted:>13.1f} {1e3 * row.measured:>12.1f} {row.error:>+7.1%}"
    return f"{where}  {row.way:26} {times} {1e3 * row.processor:>8.0f}"


def record(folder: Path) -> str:
    """A profile of ResNet-18 on 64 x 64 images, one thread, one rank."""
    path = str(folder / "profile.json")
    run([sys.executable, "-m", "benchmarks.step.plan", "--record", path])
    profile = read_profile(path)
    alone = 1e3 * profile.phases.alone
    print(f"recorded: {profile.model}, {alone:.0f} ms a step alone", flush=True)
    return path


def record_in_process(path: str) -> None:
    import lightning as L
    import torch

    from benchmarks.step.rank import MODELS, OneBatch, Trained
    from lightning_ring.monitor import RingProfile

    torch.set_num_threads(1)
    build, shape, batch_size = MODELS["resnet18"]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=18,
        callbacks=[RingProfile(path, steps=12, warmup=6)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Trained(build(), channels_last=False),
        OneBatch(shape, batch_size, "cpu", channels_last=False),
    )


def measure_link(folder: Path, seconds: float, hosts: Hosts | None) -> Link:
    """Between two of ``hosts``, or between two ranks of this node."""
    path = folder / "link.json"
    if hosts is not None:
        run(hosts.mpirun(2, *bench(path, seconds)))
    else:
        line = [mpirun_path(), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        run([*line, "-n", "2", *bench(path, seconds)])
    link = read_bench(str(path))
    for collective, cost in link.costs.items():
        alpha, bandwidth = 1e6 * cost.alpha_seconds, cost.bandwidth / 1e6
        print(f"# {collective}: {alpha:.0f} µs, {bandwidth:.1f} MB/s", flush=True)
    return link


def bench(path: Path, seconds: float) -> list[str]:
    words = ["--backends", "auto", "--device", "cpu", "--sizes", _SIZES]
    words += ["--seconds", str(seconds), "--json", str(path)]
    return [sys.executable, "-m", "lightning_ring.cli.main", "bench", *words]


def measure(
    hosts: Hosts,
    rate: str,
    layout: str,
    path: Path,
    links: tuple[Link, Link],
    asked: argparse.Namespace,
    folder: Path,
) -> Iterator[Row]:
    topology, ranks_per_host = _LAYOUTS[layout]
    num_ranks = len(hosts.names) * ranks_per_host
    out = folder / "out.json"
    words = [str(path), str(out), topology, str(asked.steps), *asked.ways]
    run(hosts.mpirun(num_ranks, sys.executable, "-m", "benchmarks.step.plan_rank", *words))
    cluster = Cluster(num_ranks, ranks_per_host, *links)
    for way, (seconds, processor) in json.loads(out.read_text()).items():
        step = predict(read_profile(path), cluster, WAYS[way])
        # steps of LocalSGD differ by design
        middle = statistics.mean if way == "local_sgd_8" else statistics.median
        name = f"{way}, {topology}"
        where = (rate, len(hosts.names), ranks_per_host, name)
        yield Row(*where, step.seconds, middle(seconds), processor)


def run(command: Sequence[str]) -> None:
    """
    Raises:
        SystemExit: It failed, or took too long; with its output.
    """
    prepare()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=_SECONDS)
    except BaseException as error:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        if isinstance(error, subprocess.TimeoutExpired):
            raise SystemExit(f"not over after {_SECONDS} s: {' '.join(command)}") from None
        raise
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}: {' '.join(command)}\n{output}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--profile", help="of RingProfile; default: record ResNet-18 first")
    add("--rates", nargs="+", default=["1gbit", "3gbit"], help="of every link, as tc writes it")
    add("--hosts", type=int, nargs="+", default=[2, 3, 4])
    nested = "nested: on 2 hosts only"
    add("--layouts", nargs="+", choices=_LAYOUTS, default=list(_LAYOUTS), help=nested)
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    add("--steps", type=int, default=8, help="whole rounds of LocalSGD(8)")
    add("--bench-seconds", type=float, default=0.6, help="for each collective and size")
    add("--tolerance", type=float, default=0.15)
    add("--json", metavar="FILE")
    add("--record", metavar="FILE", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.record:
        record_in_process(asked.record)
        return 0
    reason = why_not()
    if reason is not None:
        print(f"skipped: {reason}", file=sys.stderr)
        return 77
    prepare()  # so that the hosts are removed
    numbers = f"{'predicted ms':>13} {'measured ms':>12} {'error':>7} {'core ms':>8}"
    print(f"{'link':>9} {'hosts':>6} {'ranks':>6}  {'':26} {numbers}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in check(asked, Path(folder)):
            rows.append(row)
            print(in_words(row), flush=True)
    worst = max(rows, key=lambda row: abs(row.error))
    print(f"largest error: {worst.error:+.1%} ({worst.rate}, {worst.num_hosts} hosts, {worst.way})")
    if asked.json:
        found = [asdict(row) | {"error": row.error} for row in rows]
        Path(asked.json).write_text(json.dumps(found, indent=1) + "\n")
    return int(abs(worst.error) > asked.tolerance)


if __name__ == "__main__":
    sys.exit(main())
