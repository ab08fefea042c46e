"""What becomes of a region when its last tensor goes."""

import mmap

import torch

from lightning_ring.comm.backends.shared_memory.memory import Regions

NUM_BYTES = 1 << 20


def added(regions):
    return regions.add([mmap.mmap(-1, NUM_BYTES), mmap.mmap(-1, NUM_BYTES)], torch.float32)


def test_what_lies_at_the_address_of_a_forgotten_region_is_in_none():
    regions = Regions(rank=0)
    tensor = added(regions)
    view = tensor[100:200]
    address = tensor.data_ptr()
    assert regions.location(tensor) != regions.location(view) != 0
    del tensor
    assert regions.location(view) != 0
    del view
    others = [torch.frombuffer(mmap.mmap(-1, NUM_BYTES), dtype=torch.float32) for _ in range(8)]
    assert address in [other.data_ptr() for other in others], (
        "else this shows nothing: look for the address elsewhere"
    )
    assert [regions.location(other) for other in others] == [0] * 8


def test_a_region_at_the_address_of_a_forgotten_one_is_another():
    regions = Regions(rank=0)
    tensor = added(regions)
    address, location = tensor.data_ptr(), regions.location(tensor)
    del tensor
    again = [added(regions) for _ in range(8)]
    assert address in [other.data_ptr() for other in again], (
        "else this shows nothing: look for the address elsewhere"
    )
    assert len({location, *map(regions.location, again)}) == 9
    regions._forget(1)  # the end of one that was there before, noticed late
    assert regions.location(again[0]) != 0
