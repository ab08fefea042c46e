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
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.hosts import Hosts, mpirun_path, open_hosts, why_not
from lightning_ring.tools.plan.model import Cluster, Link, Settings, predict
from lightning_ring.tools.plan.networks import read_bench
from lightning_ring.tools.plan.profile import Profile, read_profile

ROOT = Path(__file__).resolve().parents[2]
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


def check(asked: argparse.Namespace, folder: Path) -> list[Row]:
    path = asked.profile or record(folder)
    profile = read_profile(path)
    rows: list[Row] = []
    node = measure_node(folder, asked.bench_seconds) if "hierarchical" in asked.layouts else None
    numbers = f"{'predicted ms':>13} {'measured ms':>12} {'error':>7} {'core ms':>8}"
    print(f"{'link':>9} {'hosts':>6} {'ranks':>6}  {'':26} {numbers}")
    for rate in asked.rates:
        with open_hosts(2, rate) as hosts:
            network = measure_network(hosts, folder, asked.bench_seconds)
        for num_hosts in asked.hosts:
            with open_hosts(num_hosts, rate) as hosts:
                for layout in [name for name in asked.layouts if name == "flat" or num_hosts == 2]:
                    for row in measure(
                        hosts, rate, layout, profile, Path(path), network, node, asked, folder
                    ):
                        rows.append(row)
                        print(in_words(row), flush=True)
    return rows


def in_words(row: Row) -> str:
    return (
        f"{row.rate:>9} {row.num_hosts:>6} {row.num_hosts * row.ranks_per_host:>6}  {row.way:26} "
        f"{1e3 * row.predicted:>13.1f} {1e3 * row.measured:>12.1f} {row.error:>+7.1%} "
        f"{1e3 * row.processor:>8.0f}"
    )


def record(folder: Path) -> str:
    """A profile of ResNet-18 on 64 x 64 images, one thread, one rank."""
    path = str(folder / "profile.json")
    run([sys.executable, "-m", "benchmarks.step.plan", "--record", path])
    profile = read_profile(path)
    print(
        f"recorded: {profile.model}, {1e3 * profile.phases.alone:.0f} ms a step alone", flush=True
    )
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


def measure_node(folder: Path, seconds: float) -> Link:
    path = folder / "node.json"
    line = [mpirun_path(), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]
    run([*line, *bench(path, seconds)])
    return read_bench(str(path))


def measure_network(hosts: Hosts, folder: Path, seconds: float) -> Link:
    path = folder / "network.json"
    run(hosts.mpirun(2, *bench(path, seconds)))
    link = read_bench(str(path))
    for collective, cost in link.costs.items():
        print(
            f"# {collective}: {1e6 * cost.alpha_seconds:.0f} µs, {cost.bandwidth / 1e6:.1f} MB/s",
            flush=True,
        )
    return link


def bench(path: Path, seconds: float) -> list[str]:
    words = ["--backends", "auto", "--device", "cpu", "--sizes", _SIZES]
    words += ["--seconds", str(seconds), "--json", str(path)]
    return [sys.executable, "-m", "lightning_ring.cli.main", "bench", *words]


def measure(
    hosts: Hosts,
    rate: str,
    layout: str,
    profile: Profile,
    path: Path,
    network: Link,
    node: Link | None,
    asked: argparse.Namespace,
    folder: Path,
) -> Iterator[Row]:
    topology, ranks_per_host = _LAYOUTS[layout]
    num_ranks = len(hosts.names) * ranks_per_host
    out = folder / "out.json"
    rank = [
        sys.executable,
        "-m",
        "benchmarks.step.plan_rank",
        str(path),
        str(out),
        topology,
        str(asked.steps),
        *asked.ways,
    ]
    run(hosts.mpirun(num_ranks, *rank))
    for way, (seconds, processor) in json.loads(out.read_text()).items():
        settings = replace(WAYS[way], topology=topology)
        step = predict(
            profile, Cluster(num_ranks, ranks_per_host, network, node or network), settings
        )
        name = f"{way}, {topology}"
        yield Row(
            rate,
            len(hosts.names),
            ranks_per_host,
            name,
            step.seconds,
            # steps of LocalSGD differ by design
            statistics.mean(seconds) if way == "local_sgd_8" else statistics.median(seconds),
            processor,
        )


def run(command: Sequence[str]) -> None:
    """
    Raises:
        SystemExit: It failed, or took too long; with its output.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    os.environ.update(env)  # `Hosts.mpirun` hands on what is set here
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
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
    parser.add_argument("--profile", help="of RingProfile; default: record ResNet-18 first")
    parser.add_argument(
        "--rates", nargs="+", default=["1gbit", "3gbit"], help="of every link, as tc writes it"
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument(
        "--layouts",
        nargs="+",
        choices=_LAYOUTS,
        default=list(_LAYOUTS),
        help="nested: on 2 hosts only",
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=8, help="whole rounds of LocalSGD(8)")
    parser.add_argument(
        "--bench-seconds", type=float, default=0.6, help="for each collective and size"
    )
    parser.add_argument("--tolerance", type=float, default=0.15)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--record", metavar="FILE", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.record:
        record_in_process(asked.record)
        return 0
    reason = why_not()
    if reason is not None:
        print(f"skipped: {reason}", file=sys.stderr)
        return 77
    # so that the hosts are removed
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as folder:
        rows = check(asked, Path(folder))
    worst = max(rows, key=lambda row: abs(row.error))
    print(f"largest error: {worst.error:+.1%} ({worst.rate}, {worst.num_hosts} hosts, {worst.way})")
    if asked.json:
        Path(asked.json).write_text(
            json.dumps([asdict(row) | {"error": row.error} for row in rows], indent=1) + "\n"
        )
    return int(abs(worst.error) > asked.tolerance)


if __name__ == "__main__":
    sys.exit(main())
