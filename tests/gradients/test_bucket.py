"""How a bucket is laid out."""

import pytest
import torch
from torch.nn import Parameter

from lightning_ring.comm.communicator import shard_bounds
from lightning_ring.comm.cost import number_by_size
from lightning_ring.gradients.bucket import Bucket, plan_buckets


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 7, 96])
def test_its_length_is_divisible_and_flags_stay_behind_the_gradients(num_shards):
    params = [Parameter(torch.randn(size)) for size in (5, 17, 64)]
    bucket = Bucket("abc", params, num_shards=num_shards)
    unpadded = Bucket("abc", params).flat.numel()
    assert bucket.flat.numel() % num_shards == 0
    assert 0 <= bucket.flat.numel() - unpadded < (32 * num_shards if num_shards > 1 else 1)
    for param in params:
        param.grad = torch.randn_like(param)
    bucket.begin()
    bucket.fill([True, False, True], stop=True)
    assert torch.equal(bucket.views[1], params[1].grad)
    assert bucket.flat[-4:].tolist() == [1, 0, 1, 1]
    assert bucket.used.tolist() == [1, 0, 1]
    assert bucket.stop == 1
    # what lies between is zero
    assert (bucket.flat[:-4] != 0).sum() == sum(view.numel() for view in bucket.views)


def test_a_nearly_empty_bucket_takes_the_next_parameter_and_the_first_stays_small():
    # MiB of a classifier's bias and weight, BatchNorms, convolutions
    sizes = [0.004, 8, 0.01, 0.01, 9, 0.01, 9, 2, 0.5]
    named = [("", Parameter(torch.zeros(int(size * 2**18)))) for size in sizes]
    buckets = [Bucket(*zip(*group, strict=True)) for group in plan_buckets(named, 4)]
    assert [len(bucket.params) for bucket in buckets] == [1, 1, 3, 2, 2]
    # no more memory than the gradients
    assert (
        sum(bucket.flat.nbytes for bucket in buckets)
        < sum(param.nbytes for _, param in named) + 2000
    )


def test_a_bias_goes_with_its_weight():
    assert number_by_size([7, 0.1, 9], 8, 8) == [0, 1, 1]


@pytest.mark.parametrize("num_shards", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_shard_begins_at_a_multiple_of_64_bytes(num_shards, dtype):
    """Also of what travels as 16-bit numbers, and with it every rank's part of each parameter."""
    bucket = Bucket(
        ["a", "b"],
        [Parameter(torch.zeros(size, dtype=dtype)) for size in (1001, 77)],
        num_shards=num_shards,
    )
    if dtype is torch.float32:
        bucket.travel_as(torch.float16)
    for flat in (bucket.flat, bucket.wire.flat):
        starts = [shard_bounds(flat.numel(), num_shards, rank)[0] for rank in range(num_shards)]
        assert [start * flat.element_size() % 64 for start in starts] == [0] * num_shards
