"""Errors of one rank, shutdown, and beginning again."""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI

import lightning_ring.horovod as hvd

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
torch.set_num_threads(1)


def check_an_error_of_one_rank_reaches_the_others() -> None:
    hvd.init()
    tensors = [torch.ones(2), torch.ones(3)]
    handles = [
        hvd.allreduce_async_(tensor, name=f"resized {i}") for i, tensor in enumerate(tensors)
    ]
    if RANK == 0:
        tensors[0].resize_(7)  # after it was told
    for handle in handles:
        with pytest.raises(hvd.HorovodInternalError):
            hvd.synchronize(handle)
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(torch.ones(1))
    hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == SIZE


def check_shutdown_ends_what_is_pending() -> None:
    hvd.init()
    handle = hvd.allreduce_async(torch.ones(1), name=f"of rank {RANK} alone")
    hvd.shutdown()
    with pytest.raises(hvd.HorovodInternalError, match="was shut down on "):
        hvd.synchronize(handle)
    hvd.init()
    handle = hvd.allreduce_async(torch.ones(1), name="pending") if RANK == 0 else None
    if handle is None:
        hvd.shutdown()
    else:
        with pytest.raises(hvd.HorovodInternalError, match="was shut down on "):
            hvd.synchronize(handle)
        hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == SIZE


def check_shutdown_ends_what_other_ranks_wait_for_in_any_process_set() -> None:
    for waits_for_all in (True, False):
        hvd.init()
        some = hvd.add_process_set([0, 1]) if SIZE > 2 else hvd.global_process_set
        if RANK == 0 or (waits_for_all and RANK != 1):
            with pytest.raises(hvd.HorovodInternalError, match="was shut down on "):
                hvd.barrier(hvd.global_process_set if waits_for_all else some)
        else:
            hvd.shutdown()
        hvd.init()  # rank 0 has not called shutdown
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == SIZE
        hvd.shutdown()


def check_shut_down_and_begin_again() -> None:
    hvd.init()
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.rank()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == SIZE
    hvd.shutdown()
