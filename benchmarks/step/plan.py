"""Holds `lightning-ring plan` against runs: what it predicts for 2, 3 and 4 hosts, and what a step
takes there.

    sudo python -m benchmarks.step.plan  # 2, 3 and 4 hosts at two link speeds, 3 minutes

1. One rank trains ResNet-18 and records a profile (`RingProfile`), unless --profile names one.
2. At each speed `lightning-ring bench` measures the link between two hosts, and once the memory
   that two ranks share.
3. From these two the model predicts every row; nothing is fitted to the rows themselves.
4. Ranks on the hosts replay the step: sleeps instead of computation, which two cores cannot do for
   four hosts, and the real reducer, sharding and communicators.

needs Linux, root, ip and tc: the hosts are network namespaces (`benchmarks.hosts`). The exit code
is 1 where an error is above --tolerance.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from benchmarks.hosts import Hosts, mpirun_path, open_hosts, why_not
from benchmarks.turns import prepare
from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.algorithms.local import LocalSGD
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.cost import default_cap_mb
from lightning_ring.gradients.compression import COMPRESSORS
from lightning_ring.job.communicators import open_communicator
from lightning_ring.job.job import connect
from lightning_ring.job.ranks import discover_ranks
from lightning_ring.tools.plan.inputs import Gradient, Link, Profile, read_bench, read_profile
from lightning_ring.tools.plan.model import Cluster, Settings, predict

_SIZES = "64K,256K,512K,1M,4M,16M"
_SECONDS = 200
_TIMEOUT = timedelta(seconds=60)
_WARMUP = 3  # the first backward orders buckets, the second connects
_LATE = 1e-3  # seconds that a forward may be behind without having waited
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
    print(f"recorded: {profile.run.model}, {alone:.0f} ms a step alone", flush=True)
    return path


def record_in_process(path: str) -> None:
    import lightning as L

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
    run(hosts.mpirun(num_ranks, sys.executable, "-m", "benchmarks.step.plan", "--rank", *words))
    cluster = Cluster(num_ranks, ranks_per_host, *links)
    for way, (seconds, processor) in json.loads(out.read_text()).items():
        step = predict(read_profile(path), cluster, WAYS[way])
        # steps of LocalSGD differ by design
        middle = statistics.mean if way == "local_sgd_8" else statistics.median
        name = f"{way}, {topology}"
        where = (rate, len(hosts.names), ranks_per_host, name)
        yield Row(*where, step.seconds, middle(seconds), processor)


def run(command: Sequence[str]) -> None:
    """Raises `SystemExit`: it failed, or took too long; with its output."""
    prepare()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=_SECONDS)
    except BaseException:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        raise
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}: {' '.join(command)}\n{output}")


# -- a rank on one of the hosts


class Pace:
    """When forward and backward, had they computed, would be where they are."""

    def __init__(self) -> None:
        self.due = 0.0
        self.backward_began = 0.0

    def begin_step(self) -> None:
        self.due = time.perf_counter()

    def work(self, seconds: float) -> None:
        now = time.perf_counter()
        if now > self.due + _LATE:  # it waited for parameters, which no work made up for
            self.due = now
        self.due += seconds
        sleep_until(self.due)


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


class Produce(torch.autograd.Function):
    """The identity, with a gradient for ``weight`` that is there ``ready`` seconds after
    backward began.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Layer) -> Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        layer = ctx.layer
        sleep_until(layer.pace.backward_began + layer.ready)
        # Memory of its own: ring_sharded makes a gradient that is held unreadable.
        return grad, layer.gradient.clone(), None


class Layer(nn.Module):
    def __init__(self, gradient: Gradient, seconds: float, pace: Pace, zeros: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(gradient.numel))
        self.ready = gradient.ready
        self.seconds = seconds
        self.pace = pace
        self.gradient = zeros[: gradient.numel]

    def forward(self, x: Tensor) -> Tensor:
        self.pace.work(self.seconds)
        out: Tensor = Produce.apply(x, self.weight, self)
        return out


class SleepingOptimizer(torch.optim.Optimizer):
    """Its step takes as long as the recorded one, in proportion to what it is given."""

    elementwise = True

    def __init__(self, params: Any, seconds_an_element: float) -> None:
        super().__init__(params, {"seconds_an_element": seconds_an_element})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            num_elements = sum(param.numel() for param in group["params"] if param.grad is not None)
            time.sleep(num_elements * group["seconds_an_element"])


def build(profile: Profile, pace: Pace) -> nn.Sequential:
    """Layers in the order of forward, which is backward's, reversed; times keep their
    proportion.
    """
    phases, gradients = profile.phases, profile.gradients[::-1]
    zeros = torch.zeros(max(gradient.numel for gradient in gradients))
    nexts = [*(gradient.ready for gradient in gradients[1:]), 0.0]
    share = phases.forward / phases.backward
    layers = [
        Layer(gradient, share * (gradient.ready - following), pace, zeros)
        for gradient, following in zip(gradients, nexts, strict=True)
    ]
    return nn.Sequential(*layers)


def busy_seconds() -> float:
    """Processor time of this machine so far, over all cores and processes, with interrupts."""
    words = Path("/proc/stat").read_text().split()[1:8]
    user, nice, system, _idle, _iowait, *interrupts = map(int, words)
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def make(way: str, cap_mb: float) -> Algorithm:
    if way == "local_sgd_8":
        return LocalSGD(8)
    compression = COMPRESSORS["bf16"].build() if way == "bf16" else None
    build = Sharded if way == "ring_sharded" else Averaging
    return build(bucket_cap_mb=cap_mb, compression=compression)


def replay(profile: Profile, comm: Communicator, way: str, steps: int) -> tuple[list[float], float]:
    """Seconds of each step, and processor seconds a step of all ranks together."""
    phases, pace = profile.phases, Pace()
    model = build(profile, pace)
    num_elements = sum(gradient.numel for gradient in profile.gradients)
    optimizer = SleepingOptimizer(model.parameters(), phases.optimizer / num_elements)
    cap = default_cap_mb("cpu", comm.world_size)
    algorithm = make(way, cap)
    algorithm.attach(model, [optimizer], comm, print)
    if isinstance(algorithm, Sharded):
        algorithm.overlaps = True
    seconds = []
    x = torch.zeros(1, requires_grad=True)
    for number in range(_WARMUP + steps):
        if number == _WARMUP:
            comm.barrier()
            busy = busy_seconds()
        began = time.perf_counter()
        time.sleep(phases.data + phases.copy + phases.other)
        pace.begin_step()
        algorithm.begin_batch()
        with algorithm.forward():
            loss = model(x)
        pace.backward_began = time.perf_counter()
        with algorithm.backward():
            loss.backward()
        algorithm.before_step(optimizer, has_closure=False)
        optimizer.step()
        algorithm.after_step(optimizer)
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    comm.barrier()
    busy = busy_seconds() - busy
    algorithm.detach()
    return seconds[_WARMUP:], busy / steps


def run_rank(path: str, out: str, topology: str, steps: str, *ways: str) -> None:
    """What each rank on a host does; rank 0 writes the seconds of each way's steps to ``out``."""
    torch.set_num_threads(1)
    profile, cpu = read_profile(path), torch.device("cpu")
    info = discover_ranks()
    job = connect(info, cpu, _TIMEOUT)
    comm = open_communicator(job, "auto", cpu, _TIMEOUT, _TIMEOUT, topology)
    found = {}
    for way in ways:
        everyones = comm.all_gather_object(replay(profile, comm, way, int(steps)))
        times, (busy, *_) = zip(*everyones, strict=True)
        found[way] = [max(step) for step in zip(*times, strict=True)], busy
    if info.rank == 0:
        Path(out).write_text(json.dumps(found))
    comm.barrier()  # a rank that ended now would be taken for one that failed
    comm.close()


# -- the command


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
    add("--rank", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        run_rank(*asked.rank)
        return 0
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
