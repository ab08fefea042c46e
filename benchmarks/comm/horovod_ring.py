"""What `lightning_ring.horovod` takes for named gradients and for a training step, beside Horovod
itself.

``python -m benchmarks.comm.horovod_ring names`` submits 160 short named tensors at a time on two
ranks. ``python -m benchmarks.comm.horovod_ring training`` trains ResNet-50 as Horovod's synthetic
benchmark does: random images, SGD, `DistributedOptimizer` with named parameters.

With ``--horovod PYTHON``, an interpreter that has Horovod 0.28.1 built for PyTorch with Gloo, both
run under Horovod too, in turns (`benchmarks/turns.py`), so that both meet the same machine.
Processor time, of all threads of a rank, depends less on what else runs.
"""

import argparse
import importlib
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.turns import Conductor, Turns, parser_of, prepare

NUM_NAMES = 160
NUMEL = 10
WARM_UP = 3
RANKS, BATCH = 2, 2


def names(hvd):
    """A step all-reduces `NUM_NAMES` named tensors in place."""
    import torch

    named = {f"layer{number}.weight": torch.ones(NUMEL) for number in range(NUM_NAMES)}

    def step():
        handles = [hvd.allreduce_async_(tensor, name=name) for name, tensor in named.items()]
        for handle in handles:
            hvd.synchronize(handle)

    return step


def training(hvd):
    """Horovod's synthetic benchmark: the same random batch at every step."""
    import torch
    import torch.nn.functional as F
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.resnet50()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data = torch.randn(BATCH, 3, 64, 64)
    target = torch.randint(1000, (BATCH,))

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(data), target).backward()
        optimizer.step()

    return step


BENCHMARKS = {"names": names, "training": training}
STEPS = {"names": 50, "training": 1}  # a turn


def rank(asked):
    """One rank of one job."""
    import torch

    torch.set_num_threads(1)
    hvd = importlib.import_module(asked.rank)
    hvd.init()
    turns = Turns(asked.rank)
    step = BENCHMARKS[asked.benchmark](hvd)
    processor = []
    while turns.wait():
        began = time.process_time()
        step()
        processor.append((time.process_time() - began) * 1e3)
    turns.leave({"processor_ms": statistics.median(processor[2 * WARM_UP :])})
    hvd.shutdown()


def commands(asked):
    """What starts each job, by its name."""
    words = ["-m", "benchmarks.comm.horovod_ring", asked.benchmark, "--rank"]
    ringrun = [sys.executable, "-m", "lightning_ring.cli.ringrun", "--no-mpi"]
    ringrun += ["-n", str(RANKS), sys.executable]
    found = {"lightning_ring.horovod": [*ringrun, *words, "lightning_ring.horovod"]}
    if asked.horovod:
        horovodrun = str(Path(asked.horovod).with_name("horovodrun"))
        theirs = [asked.horovod, horovodrun, "--gloo", "-np", str(RANKS), asked.horovod]
        found["horovod.torch"] = [*theirs, *words, "horovod.torch"]
    return found


def measure(asked):
    prepare()
    started = commands(asked)
    jobs = list(started)
    seconds = {job: [] for job in jobs}
    with tempfile.TemporaryDirectory() as folder, Conductor(Path(folder)) as conductor:
        conductor.open(list(started.values()), jobs, RANKS)
        for number in range(asked.rounds + WARM_UP):
            for job in jobs if number % 2 else jobs[::-1]:
                times = conductor.turn(job, STEPS[asked.benchmark])
                if number >= WARM_UP:
                    seconds[job].append(min(times))
        facts = conductor.finish()
    print(f"{asked.rounds} turns of {STEPS[asked.benchmark]} steps")
    for job, times in seconds.items():
        print(f"{job:24} fastest step {min(times) * 1e3:9.3f} ms")
        print(f"    processor time of a step, median {facts[job][0]['processor_ms']:9.1f} ms")
    if len(jobs) == 2:
        ours, theirs = (min(times) for times in seconds.values())
        print(f"ours / Horovod: {ours / theirs:.3f} of the fastest")


def main():
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("benchmark", choices=BENCHMARKS)
    add("--horovod", metavar="PYTHON", help="interpreter that has Horovod; horovodrun beside it")
    add("--rounds", type=int, default=20, help="turns of each job")
    add("--rank", metavar="MODULE", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        rank(asked)
    else:
        measure(asked)


if __name__ == "__main__":
    main()
