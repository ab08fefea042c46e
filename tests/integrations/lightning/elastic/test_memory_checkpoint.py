"""The checkpoint in memory: every rank loads the bits that rank 0 has written."""

import copy
import gc
import os

import pytest
import torch

from lightning_ring.integrations.lightning.elastic import checkpoints as memory_checkpoint
from lightning_ring.integrations.lightning.elastic.checkpoints import MemoryCheckpoint
from tests.thread_ranks import run_ranks


@pytest.mark.parametrize("numel", [None, 0, 5000])  # 5000: 21 chunks
def test_all_ranks_load_what_rank_0_has_written(numel, monkeypatch):
    monkeypatch.setattr(memory_checkpoint, "CHUNK_BYTES", 1000)
    checkpoint = {"optimizer_states": []}
    if numel is not None:
        states = [{"state": {0: {"exp_avg": torch.randn(numel)}}}]
        checkpoint = {"optimizer_states": states, "weights": torch.randn(numel), "epoch": 3}

    def send(comm):
        held = MemoryCheckpoint()
        held.send(comm, torch.device("cpu"), checkpoint if comm.rank == 0 else None)
        return copy.deepcopy(held.load())

    run_ranks(2, send)  # whatever is opened once
    before = os.listdir("/proc/self/fd")
    for loaded in run_ranks(2, send):
        torch.testing.assert_close(loaded, checkpoint, rtol=0, atol=0)
    gc.collect()
    assert os.listdir("/proc/self/fd") == before
    assert torch.serialization.get_crc32_options()
