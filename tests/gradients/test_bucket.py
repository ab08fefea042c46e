"""How a bucket is laid out."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from lightning_ring.comm.thread_backend import run_ranks
from lightning_ring.gradients import Bucket, Reducer


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 7, 96])
def test_its_length_is_divisible_and_flags_stay_behind_the_gradients(num_shards: int) -> None:
    params = [Parameter(torch.randn(size)) for size in (5, 17, 64)]
    bucket = Bucket(["a", "b", "c"], params, num_shards=num_shards)
    unpadded = Bucket(["a", "b", "c"], params).flat.numel()
    assert bucket.flat.numel() % num_shards == 0
    assert 0 <= bucket.flat.numel() - unpadded < num_shards
    for param in params:
        param.grad = torch.randn_like(param)
    bucket.begin()
    bucket.fill([True, False, True], stop=True)
    assert [torch.equal(view, param.grad) for view, param in zip(bucket.views[1:2], params[1:2], strict=True)] == [True]
    assert bucket.flat[-4:].tolist() == [1, 0, 1, 1]
    assert bucket.used.tolist() == [1, 0, 1]
    assert bucket.stop.tolist() == [1]
    between = sum(view.numel() for view in bucket.views)
    assert int((bucket.flat[:-4] != 0).sum()) == between, "what lies between is zero"


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_reducers_buckets_are_divisible_by_the_ranks(world_size: int) -> None:
    def lengths(comm) -> list[int]:
        named = [(f"p{size}", Parameter(torch.zeros(size))) for size in (3, 70, 500)]
        return [bucket.flat.numel() for bucket in Reducer(comm, named, bucket_cap_mb=0.001).buckets]

    for found in run_ranks(world_size, lengths):
        assert len(found) > 1
        assert [length % world_size for length in found] == [0] * len(found)
