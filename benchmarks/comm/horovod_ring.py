"""What `lightning_ring.horovod` takes for named gradients and for a training step, beside Horovod
itself.

``python -m benchmarks.comm.horovod_ring names`` submits 160 short named tensors at a time on two
ranks. ``python -m benchmarks.comm.horovod_ring training`` trains ResNet-50 as Horovod's synthetic
benchmark does: random images, SGD, `DistributedOptimizer` with named parameters.

With ``--horovod PYTHON``, an interpreter that has Horovod 0.28.1 built for PyTorch with Gloo, both
run under Horovod too. The jobs are up from the start and take turns (`benchmarks/turns.py`), so
that both meet the same machine; ratios are those of turns that follow each other. Processor time,
of all threads of a rank, depends less on what else runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.turns import Conductor, Turns, prepare

NUM_NAMES = 160
NUMEL = 10
WARM_UP = 3


def named_steps(hvd: Any, turns: Turns, _: argparse.Namespace) -> dict[str, Any]:
    """All-reduce `NUM_NAMES` named tensors in place at every step."""
    import torch

    tensors = [torch.ones(NUMEL) for _ in range(NUM_NAMES)]
    names = [f"layer{number}.weight" for number in range(NUM_NAMES)]
    processor = []
    while turns.wait():
        began = time.process_time()
        handles = [
            hvd.allreduce_async_(tensor, name=name)
            for tensor, name in zip(tensors, names, strict=True)
        ]
        for handle in handles:
            hvd.synchronize(handle)
        processor.append((time.process_time() - began) * 1e3)
    return of_processor(processor)


def training_steps(hvd: Any, turns: Turns, asked: argparse.Namespace) -> dict[str, Any]:
    """Horovod's synthetic benchmark: the same random batch at every step."""
    import torch
    import torch.nn.functional as F
    import torchvision

    torch.manual_seed(0)
    model = getattr(torchvision.models, asked.model)()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data = torch.randn(asked.batch, 3, asked.pixels, asked.pixels)
    target = torch.randint(1000, (asked.batch,))
    processor = []
    while turns.wait():
        began = time.process_time()
        optimizer.zero_grad()
        F.cross_entropy(model(data), target).backward()
        optimizer.step()
        processor.append((time.process_time() - began) * 1e3)
    return of_processor(processor)


def of_processor(times: list[float]) -> dict[str, Any]:
    kept = times[2 * WARM_UP :]
    return {"processor time, ms": (min(kept), statistics.median(kept))}


BENCHMARKS = {"names": named_steps, "training": training_steps}


def rank(asked: argparse.Namespace) -> None:
    """One rank of one job."""
    import torch

    torch.set_num_threads(1)
    hvd = importlib.import_module(asked.rank)
    hvd.init()
    turns = Turns(asked.rank)
    turns.leave(BENCHMARKS[asked.benchmark](hvd, turns, asked))
    hvd.shutdown()


def commands(asked: argparse.Namespace) -> dict[str, list[str]]:
    """What starts each job, by its name."""
    words = [
        *("-m", "benchmarks.comm.horovod_ring", asked.benchmark, "--model", asked.model),
        *("--batch", str(asked.batch), "--pixels", str(asked.pixels), "--rank"),
    ]
    ours = [
        sys.executable,
        "-m",
        "lightning_ring.cli.ringrun",
        "--no-mpi",
        "-n",
        str(asked.ranks),
        sys.executable,
    ]
    found = {"lightning_ring.horovod": [*ours, *words, "lightning_ring.horovod"]}
    if asked.horovod:
        runner = str(Path(asked.horovod).with_name("horovodrun"))
        theirs = [asked.horovod, runner, "--gloo", "-np", str(asked.ranks), asked.horovod]
        found["horovod.torch"] = [*theirs, *words, "horovod.torch"]
    return found


def measure(asked: argparse.Namespace) -> None:
    prepare()
    started = commands(asked)
    jobs = list(started)
    seconds: dict[str, list[float]] = {job: [] for job in jobs}
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder, Conductor(Path(folder)) as conductor:
        conductor.start(list(started.values()), jobs, asked.ranks)
        for number in range(asked.rounds + WARM_UP):
            for job in jobs if number % 2 else jobs[::-1]:
                times = conductor.turn(job, asked.steps)
                if number >= WARM_UP:
                    seconds[job].append(min(times))
        loads.append(os.getloadavg()[0])
        facts = conductor.finish()
    print(f"{asked.ranks} ranks, {asked.rounds} turns of {asked.steps} steps")
    print(f"load average {loads[0]:.1f} to {loads[1]:.1f}")
    for job, times in seconds.items():
        print(
            f"{job:24} fastest step {min(times) * 1e3:9.3f} ms, median turn "
            f"{statistics.median(times) * 1e3:9.3f} ms"
        )
        for part, (least, median) in facts[job][0].items():
            print(f"    {part:18} least {least:8.1f}, median {median:8.1f}")
    if len(jobs) == 2:
        ratios = [ours / theirs for ours, theirs in zip(*seconds.values(), strict=True)]
        fastest = min(seconds[jobs[0]]) / min(seconds[jobs[1]])
        print(
            f"ours / Horovod: {fastest:.3f} of the fastest, {statistics.median(ratios):.3f} "
            "median of turns"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument(
        "--horovod", metavar="PYTHON", help="interpreter with Horovod; horovodrun lies beside it"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each job")
    parser.add_argument(
        "--steps", type=int, default=None, help="a turn; by default 50 for names, 1 for training"
    )
    parser.add_argument("--model", default="resnet50", help="of torchvision")
    parser.add_argument("--batch", type=int, default=2, help="images a rank")
    parser.add_argument("--pixels", type=int, default=64, help="height and width of an image")
    parser.add_argument("--rank", metavar="MODULE", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.steps = asked.steps or (50 if asked.benchmark == "names" else 1)
    if asked.rank:
        rank(asked)
    else:
        measure(asked)


if __name__ == "__main__":
    main()
