"""Two jobs one after the other.

``membership_script.py FOLDER BACKEND ...``: each rank writes ``RANK.json``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_ring import RingStrategy
from lightning_ring.job.communicators import open_communicator
from lightning_ring.job.job import current_job

FOLDER, BACKENDS = Path(sys.argv[1]), sys.argv[2:]
CPU, TIMEOUT = torch.device("cpu"), timedelta(seconds=60)


def fit(backend: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module = BoringModel()
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=RingStrategy(backend=backend, monitor=False),
        max_steps=2,
        limit_val_batches=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    job = current_job()
    assert job is not None
    return {
        "rank": trainer.global_rank,
        "world_size": trainer.world_size,
        "generation": job.info.generation,
        "communicator": type(job.communicator).__name__,
        "sum": float(module.layer.weight.detach().double().sum()),
    }


def sums() -> list[float]:
    """The sum of 1, 2, ... over the ranks of the current job, through each backend and the
    default group.
    """
    job = current_job()
    assert job is not None
    found = []
    for backend in BACKENDS:
        total = torch.full((70_000,), job.info.rank + 1.0)
        open_communicator(job, backend, CPU, TIMEOUT, TIMEOUT).all_reduce_(total).wait()
        assert (total == total[0]).all()
        found.append(total[0].item())
    total = torch.full((1,), job.info.rank + 1.0)
    torch.distributed.all_reduce(total)
    return [*found, total.item()]


def of_jobs() -> list[str]:
    return sorted(
        thread.name for thread in threading.enumerate() if thread.name.startswith("ring-")
    )


def main() -> None:
    first, first_sums = fit(BACKENDS[0]), sums()
    job = current_job()
    assert job is not None
    job.close()
    assert current_job() is None
    closed = {
        "threads": of_jobs(),
        "group": torch.distributed.is_initialized(),
        "GLOO": "GLOO_SOCKET_IFNAME" in os.environ,
    }
    result: dict[str, Any] = {
        "closed": closed,
        "fits": [first, fit(BACKENDS[0])],
        "sums": [first_sums, sums()],
    }
    (FOLDER / f"{first['rank']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
