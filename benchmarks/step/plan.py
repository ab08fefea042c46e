"""Holds `lightning-ring plan` against runs: what it predicts for 2, 3 and 4 hosts, and what a step
takes there.

    sudo python -m benchmarks.step.plan  # 2, 3 and 4 hosts at two link speeds, 3 minutes

From a profile of ResNet-18 (`RingProfile`) and from what `lightning-ring bench` measures between
two hosts, and between two ranks of one, the model predicts every row. Ranks on the hosts replay the
step: sleeps instead of computation, which two cores cannot do for four hosts, and the real
reducer, sharding and communicators. The hosts are network namespaces (`tests.hosts`).
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from benchmarks.turns import Processes, parser_of, prepare
from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.algorithms.local import LocalSGD
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.comm.cost import default_cap_mb
from lightning_ring.gradients.compression import COMPRESSORS
from lightning_ring.job.communicators import open_communicator
from lightning_ring.job.job import connect
from lightning_ring.job.ranks import discover_ranks
from lightning_ring.tools.plan.inputs import read_bench, read_profile
from lightning_ring.tools.plan.model import Cluster, Settings, predict
from tests.hosts import open_hosts, why_not

SIZES = "64K,256K,512K,1M,4M,16M"
SECONDS = 200
TIMEOUT = timedelta(seconds=60)
WARMUP = 3  # the first backward orders buckets, the second connects
LATE = 1e-3  # seconds that a forward may be behind without having waited
LAYOUTS = {"flat": 1, "hierarchical": 2}  # topology: ranks a host
WAYS = {
    "ring": Settings(),
    "ring_sharded": Settings(sharded=True),
    "bf16": Settings(sixteen_bits=True),
    "local_sgd_8": Settings(local_steps=8),
}


def measure_all(asked, folder):
    """Print a line for each row; returns the largest error."""
    path, worst = Path(asked.profile or folder / "profile.json"), 0.0
    if not asked.profile:
        run(folder, [sys.executable, "-m", "benchmarks.step.plan", "--record", str(path)])
    profile = read_profile(path)
    node = measure_link(folder, asked.bench_seconds, None) if 2 in asked.hosts else None
    for rate in asked.rates:
        with open_hosts(2, rate) as hosts:
            network = measure_link(folder, asked.bench_seconds, hosts)
        for num_hosts, (topology, per_host) in itertools.product(asked.hosts, LAYOUTS.items()):
            if topology == "hierarchical" and num_hosts != 2:
                continue  # too many ranks for two cores
            out, num_ranks = folder / "out.json", num_hosts * per_host
            rank = [sys.executable, "-m", "benchmarks.step.plan", "--rank", str(path), str(out)]
            with open_hosts(num_hosts, rate) as hosts:
                run(folder, hosts.mpirun(num_ranks, *rank, topology, str(asked.steps)))
            cluster = Cluster(num_ranks, per_host, network, node or network)
            for way, seconds in json.loads(out.read_text()).items():
                predicted = predict(profile, cluster, WAYS[way]).seconds
                # steps of LocalSGD differ by design
                middle = statistics.mean if way == "local_sgd_8" else statistics.median
                measured = middle(seconds)
                error = predicted / measured - 1
                times = f"{1e3 * predicted:13.1f} {1e3 * measured:12.1f} {error:+7.1%}"
                where = f"{rate:>9} {num_hosts:6} {num_ranks:6}"
                print(f"{where}  {way + ', ' + topology:26} {times}", flush=True)
                worst = max(worst, abs(error))
    return worst


def record(path):
    """A profile of ResNet-18 on 64 x 64 images, one thread, one rank."""
    import lightning as L

    from benchmarks.step.rank import MODELS, Trained, one_batch
    from lightning_ring.monitor import RingProfile

    torch.set_num_threads(1)
    build, shape, batch_size = MODELS["resnet18"]
    profile = RingProfile(path, steps=12, warmup=6)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {"accelerator": "cpu", "devices": 1, **dict.fromkeys(quiet, False)}
    trainer = L.Trainer(max_steps=18, callbacks=[profile], **options)
    batches = itertools.repeat(one_batch(shape, batch_size), 100)
    trainer.fit(Trained(build(), channels_last=False), batches)


def measure_link(folder, seconds, hosts):
    """Between two of ``hosts``, or between two ranks of this node."""
    path = folder / "link.json"
    bench = [sys.executable, "-m", "lightning_ring.cli.main", "bench", "--backends", "auto"]
    bench += ["--device", "cpu", "--sizes", SIZES, "--seconds", str(seconds), "--json", str(path)]
    run(folder, [*bench, "-n", "2"] if hosts is None else hosts.mpirun(2, *bench))
    return read_bench(str(path))


def run(folder, command):
    """Raises `SystemExit`: it failed, or took too long; with its output."""
    with Processes(folder) as processes:
        process = processes.start(command)
        processes.wait(SECONDS)
        if process.poll() != 0:
            raise SystemExit(f"{' '.join(command)}\n{processes.outputs()}")


# -- a rank on one of the hosts


class Pace:
    """When forward and backward, had they computed, would be where they are."""

    due = backward_began = 0.0

    def work(self, seconds):
        now = time.perf_counter()
        if now > self.due + LATE:  # it waited for parameters, which no work made up for
            self.due = now
        self.due += seconds
        sleep_until(self.due)


def sleep_until(moment):
    time.sleep(max(0.0, moment - time.perf_counter()))


class Produce(torch.autograd.Function):
    """The identity, with a gradient for ``weight`` that is there ``ready`` seconds after
    backward began.
    """

    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.layer = layer
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        layer = ctx.layer
        sleep_until(layer.pace.backward_began + layer.ready)
        # Memory of its own: ring_sharded makes a gradient that is held unreadable.
        return grad, layer.gradient.clone(), None


class Layer(nn.Module):
    def __init__(self, gradient, seconds, pace, zeros):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(gradient.numel))
        self.ready = gradient.ready
        self.seconds = seconds
        self.pace = pace
        self.gradient = zeros[: gradient.numel]

    def forward(self, x):
        self.pace.work(self.seconds)
        out = Produce.apply(x, self.weight, self)
        return out


class SleepingOptimizer(torch.optim.Optimizer):
    """Its step takes as long as the recorded one, in proportion to what it is given."""

    elementwise = True

    def __init__(self, params, seconds_an_element):
        super().__init__(params, {"seconds_an_element": seconds_an_element})

    def step(self, closure=None):
        for group in self.param_groups:
            num_elements = sum(param.numel() for param in group["params"] if param.grad is not None)
            time.sleep(num_elements * group["seconds_an_element"])


def build(profile, pace):
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


def make(way, cap_mb):
    if way == "local_sgd_8":
        return LocalSGD(8)
    compression = COMPRESSORS["bf16"].build() if way == "bf16" else None
    build = Sharded if way == "ring_sharded" else Averaging
    return build(bucket_cap_mb=cap_mb, compression=compression)


def replay(profile, comm, way, steps):
    """Seconds of each step."""
    phases, pace = profile.phases, Pace()
    model = build(profile, pace)
    num_elements = sum(gradient.numel for gradient in profile.gradients)
    optimizer = SleepingOptimizer(model.parameters(), phases.optimizer / num_elements)
    algorithm = make(way, default_cap_mb("cpu", comm.world_size))
    algorithm.attach(model, [optimizer], comm, print)
    if isinstance(algorithm, Sharded):
        algorithm.overlaps = True
    seconds = []
    x = torch.zeros(1, requires_grad=True)
    for _ in range(WARMUP + steps):
        began = time.perf_counter()
        time.sleep(phases.data + phases.copy + phases.other)
        pace.due = time.perf_counter()
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
    algorithm.detach()
    return seconds[WARMUP:]


def run_rank(path, out, topology, steps):
    """What each rank on a host does; rank 0 writes the seconds of each way's steps to ``out``."""
    torch.set_num_threads(1)
    profile, cpu = read_profile(path), torch.device("cpu")
    info = discover_ranks()
    job = connect(info, cpu, TIMEOUT)
    comm = open_communicator(job, "auto", cpu, TIMEOUT, TIMEOUT, topology)
    found = {}
    for way in WAYS:
        times = comm.all_gather_object(replay(profile, comm, way, int(steps)))
        found[way] = [max(step) for step in zip(*times, strict=True)]
    if info.rank == 0:
        Path(out).write_text(json.dumps(found))
    comm.barrier()  # a rank that ended now would be taken for one that failed
    comm.close()


# -- the command


def main():
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--profile", help="of RingProfile; default: record ResNet-18 first")
    add("--rates", nargs="+", default=["1gbit", "3gbit"], help="of every link, as tc writes it")
    add("--hosts", type=int, nargs="+", default=[2, 3, 4])
    add("--steps", type=int, default=8, help="whole rounds of LocalSGD(8)")
    add("--bench-seconds", type=float, default=0.6, help="for each collective and size")
    add("--record", metavar="FILE", help="only write a profile of ResNet-18")
    add("--rank", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        run_rank(*asked.rank)
        return 0
    if asked.record:
        record(asked.record)
        return 0
    if reason := why_not():
        print(f"skipped: {reason}", file=sys.stderr)
        return 77
    prepare()  # so that the hosts are removed
    numbers = f"{'predicted ms':>13} {'measured ms':>12} {'error':>7}"
    print(f"{'link':>9} {'hosts':>6} {'ranks':>6}  {'':26} {numbers}")
    with tempfile.TemporaryDirectory() as folder:
        print(f"largest error: {measure_all(asked, Path(folder)):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
