"""Errors of one rank, shutdown, and beginning again."""

import pytest
import torch

import lightning_ring.horovod as hvd
from tests.checks.horovod.world import RANK, SIZE, total


def check_an_error_of_one_rank_reaches_the_others():
    hvd.init()
    tensors = [torch.ones(2), torch.ones(3)]
    handles = [hvd.allreduce_async_(one, name=f"resized {len(one)}") for one in tensors]
    if RANK == 0:
        tensors[0].resize_(7)  # after it was told
    for handle in handles:
        with pytest.raises(hvd.HorovodInternalError):
            hvd.synchronize(handle)
    with pytest.raises(hvd.HorovodInternalError):
        total()
    hvd.shutdown()
    hvd.init()
    assert total() == SIZE


def check_shutdown_ends_what_is_pending():
    hvd.init()
    handle = hvd.allreduce_async(torch.ones(1), name=f"of rank {RANK} alone")
    hvd.shutdown()
    with pytest.raises(hvd.HorovodInternalError, match="was shut down on "):
        hvd.synchronize(handle)
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.rank()


def check_shutdown_ends_what_other_ranks_wait_for_in_any_process_set():
    for waits_for_all in (True, False):
        hvd.init()
        some = hvd.add_process_set([0, 1]) if SIZE > 2 else hvd.global_process_set
        if RANK == 0 or (waits_for_all and RANK != 1):
            with pytest.raises(hvd.HorovodInternalError, match="was shut down on "):
                hvd.barrier(hvd.global_process_set if waits_for_all else some)
        else:
            hvd.shutdown()
        hvd.init()  # rank 0 has not called shutdown
        assert total() == SIZE
        hvd.shutdown()
