"""Sends rank 0's tensors to ranks that have most of them already: only those travel that differ."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.replicate import broadcast_tensors


def broadcast_differing(
    tensors: Sequence[Tensor], comm: Communicator, *, compares: bool, new: Sequence[int] = ()
) -> int:
    """Replace ``tensors`` by rank 0's, in place, on ranks that ``compare`` them. Returns the bytes
    that were sent.

    The other ranks hold rank 0's values, but for those at the indices ``new``, which are empty. All
    ranks have the same shapes and dtypes. Collective.
    """
    own = digests_of(tensors) if compares or comm.rank == 0 else []
    digests = comm.broadcast_object(own if comm.rank == 0 else None, name="digests of tensors")
    assert digests is not None
    differing = {*new, *(index for index, digest in enumerate(own) if digest != digests[index])}
    on_any = sorted(set().union(*comm.all_gather_object(differing, name="tensors that differ")))
    broadcast_tensors([tensors[index] for index in on_any], comm)
    return sum(tensors[index].nbytes for index in on_any)


def digests_of(tensors: Sequence[Tensor]) -> list[str]:
    """In as many threads as torch computes with."""
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as threads:
        return list(threads.map(digest_of, tensors))


@torch.no_grad()
def digest_of(tensor: Tensor) -> str:
    """Tells tensors of one shape and dtype apart by their bits: the CRC-32 of the memory, and a sum
    of its words.

    Not against design: two tensors that somebody has chosen may have one digest.
    """
    dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    own = (
        tensor.detach() if dense and tensor.device.type == "cpu" else tensor.detach().cpu().clone()
    )
    data = own.as_strided((own.numel(),), (1,)).view(torch.uint8)
    words = data[: data.numel() // 8 * 8]
    aligned = words.data_ptr() % 8 == 0 and words.storage_offset() % 8 == 0
    total = int((words if aligned else words.clone()).view(torch.int64).sum())
    return f"{zlib.crc32(data.numpy().data):08x} {total:x}"
