"""What it costs the host to intercept reads of parameters under ``ring_sharded``. Two ranks of this
node.

    OMP_NUM_THREADS=1 ringrun -n 2 python -m benchmarks.step.parameter_reads

Small inputs, so that a forward is host time mostly. Turns of 20 steps: with parameters that are on
their way when forward starts, and with complete ones, of which no read is intercepted. Processor
time of the main thread in forward, without waits: the least of each turn, median of the turns.
"""

from __future__ import annotations

import statistics
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import resnet18

from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.algorithms.step_hooks import StepHooks
from lightning_ring.comm.replicate import broadcast_module
from lightning_ring.job.communicators import open_communicator
from lightning_ring.job.job import open_job
from lightning_ring.job.ranks import discover_ranks

TURNS, STEPS = 10, 20


def models() -> dict[str, tuple[nn.Module, Tensor]]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return {
        "ResNet-18": (resnet18(), torch.randn(2, 3, 32, 32)),
        "12 transformer layers": (nn.TransformerEncoder(layer, 12), torch.randn(2, 8, 64)),
    }


def forward_times(model: nn.Module, inputs: Tensor, comm: Any) -> dict[str, list[float]]:
    broadcast_module(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    algorithm = Sharded()
    algorithm.attach(model, [optimizer], comm)
    hooks = StepHooks(algorithm)
    ways = {"intercepted": True, "complete before": False}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(TURNS):
        for way, overlaps in ways.items():
            algorithm.overlaps = overlaps
            turn = []
            for _ in range(STEPS):
                algorithm.begin_batch()
                while not all(work.done() for work in algorithm._parameters._gathers.values()):
                    time.sleep(1e-4)  # the waits themselves are not measured
                began = time.thread_time()
                with algorithm.forward():
                    loss = model(inputs).square().mean()
                turn.append(time.thread_time() - began)
                with algorithm.backward():
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            times[way].append(1e6 * min(turn))
    hooks.remove()
    algorithm.detach()
    return times


def main() -> None:
    torch.manual_seed(0)
    info, device = discover_ranks(), torch.device("cpu")
    job = open_job(info, device, timeout=timedelta(minutes=5))
    comm = open_communicator(
        job, "auto", device, timedelta(minutes=5), stall_warning=timedelta(minutes=1)
    )
    for name, (model, inputs) in models().items():
        times = forward_times(model, inputs, comm)
        if info.rank == 0:
            num = sum(1 for _ in model.parameters())
            words = ", ".join(
                f"{way} {statistics.median(each):,.0f}" for way, each in times.items()
            )
            print(f"{name}, {num} parameters, µs of a forward on rank 0: {words}", flush=True)
    job.close()


if __name__ == "__main__":
    main()
