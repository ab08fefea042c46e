"""Run as a program by every rank of a trial: an all-reduce through each backend, checked; rank 0
prints the results.

    python -m lightning_ring.tools.doctor.rank cpu auto gloo mpi

One line of JSON before a backend is tried and one after it, so that a trial that hangs has said
where.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from datetime import timedelta
from logging.handlers import BufferingHandler

import torch

from lightning_ring.comm.backends.gloo import open_torch_communicator
from lightning_ring.comm.waiting import WaitPolicy
from lightning_ring.job.communicators import open_communicator
from lightning_ring.job.job import Job, connect
from lightning_ring.job.ranks import discover_ranks
from lightning_ring.tools.bench.session import choose_device

PREFIX = "lightning_ring.tools.doctor "
_TIMEOUT = timedelta(seconds=20)
_NUMEL = 2**18  # 1 MiB


def main(arguments: list[str]) -> None:
    """
    Raises:
        RingError: A backend is not there, or ranks cannot reach each other.
        RuntimeError: A sum is wrong.
    """
    # of warnings: where shared memory was not to be had, one says why
    notes = BufferingHandler(sys.maxsize)
    notes.setLevel(logging.WARNING)
    logging.getLogger("lightning_ring").addHandler(notes)
    info = discover_ranks()
    device = choose_device(arguments[0], info)
    job = connect(info, device, _TIMEOUT)
    control = open_torch_communicator("gloo", WaitPolicy(_TIMEOUT, job.check))
    for backend in arguments[1:]:
        _say(job, backend)
        kind = _all_reduce(job, backend, device)
        _say(job, backend, kind, [record.getMessage() for record in notes.buffer])
        notes.flush()  # forgets them
    control.barrier()  # a rank that ended now would be taken for one that failed
    control.close()


def _all_reduce(job: Job, backend: str, device: torch.device) -> str:
    """The class that did it."""
    comm = open_communicator(job, backend, device, _TIMEOUT, stall_warning=_TIMEOUT)
    # sums stay exact for thousands of ranks
    numbers = torch.arange(_NUMEL, dtype=torch.float32, device=device) % 1000
    summed = numbers * (comm.rank + 1)
    comm.all_reduce_(summed, name=f"doctor, {backend}").wait()
    expected = numbers * (comm.world_size * (comm.world_size + 1) // 2)
    if not torch.equal(summed, expected):
        wrong = int((summed != expected).sum())
        raise RuntimeError(f"{backend}: {wrong} of {_NUMEL} sums are wrong")
    return type(comm).__name__


def _say(job: Job, backend: str, kind: str = "", notes: Sequence[str] = ()) -> None:
    if job.info.rank == 0:
        print(PREFIX + json.dumps({"backend": backend, "kind": kind, "notes": notes}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
