"""16-bit tensors summed in float32 and rounded once, where a ring would round at every hop.

Everybody sends everybody's shard straight to its owner, which takes the same bytes on the wire as
the ring does: (N−1)/N of the tensor. The owner adds them in the order of the ranks, so that the
result does not depend on who owns it.

Of two values, one addition in 16 bits is that sum: torch adds in float32 and rounds the result. An
average of bfloat16 is the sum of halves then, which are exact but for values below 2⁻¹²⁵; with one
of those it may differ in its last bit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ring.comm.communicator import ReduceOp, shard
from lightning_ring.comm.ring import (
    PIECE_BYTES,
    WINDOW,
    all_gather_,
    cut,
    landing_places,
    num_pieces,
)
from lightning_ring.comm.transport import PointToPoint, Request

# elements that are summed at once: two such float32 buffers stay in the second-level cache
_CHUNK = 64 * 1024


def wants_wide_sum(dtype: torch.dtype, op: ReduceOp) -> bool:
    return dtype in (torch.float16, torch.bfloat16) and op in (ReduceOp.SUM, ReduceOp.AVG)


def reduce_scatter_(
    flat: Tensor,
    p2p: PointToPoint,
    op: ReduceOp,
    *,
    scratch: Tensor | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> Tensor:
    """Reduce 16-bit 1-D ``flat`` by SUM or AVG in place: rank r's shard then holds the result, the
    rest is untouched.

    ``scratch`` is uint8 memory of at least `ring.scratch_bytes`. A piece is summed while the next
    one arrives.
    """
    world_size, rank = p2p.world_size, p2p.rank
    peers = [peer for peer in range(world_size) if peer != rank]
    if not peers:
        return flat
    op = halved_(flat, op, world_size)
    window = max(2, WINDOW // len(peers))
    piece_bytes = min(piece_bytes, WINDOW * piece_bytes // (window * len(peers)))
    count = num_pieces(-(-flat.numel() // world_size), flat.element_size(), piece_bytes)
    pieces = [cut(shard(flat, world_size, owner), count) for owner in range(world_size)]
    landing = landing_places(pieces[rank][0], window, len(peers), scratch)
    wide = torch.empty(2, min(_CHUNK, pieces[rank][0].numel()), dtype=torch.float32)
    sends: list[Request] = []
    arriving: deque[tuple[list[Tensor], list[Request]]] = deque()
    num_posted = 0
    for index, own in enumerate(pieces[rank]):
        while num_posted < min(index + window, count):
            numel = pieces[rank][num_posted].numel()
            places = [place[:numel] for place in landing[num_posted % window]]
            receives = (
                [p2p.irecv(place, peer) for place, peer in zip(places, peers, strict=True)]
                if numel
                else []
            )
            sends += [
                p2p.isend(pieces[peer][num_posted], peer)
                for peer in peers
                if pieces[peer][num_posted].numel()
            ]
            arriving.append((places, receives))
            num_posted += 1
        places, receives = arriving.popleft()
        p2p.wait(receives)
        places.insert(rank, own)
        sum_into_(own, places, op, wide)
    p2p.wait(sends)
    return flat


def all_reduce_(
    flat: Tensor,
    p2p: PointToPoint,
    op: ReduceOp,
    *,
    scratch: Tensor | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> Tensor:
    """Reduce 16-bit 1-D ``flat`` by SUM or AVG in place; ``scratch`` as above.

    Two ranks send each other all they have, and both add: as many bytes as both halves of a ring,
    but nothing that is sent waits for a sum.
    """
    if p2p.world_size == 2:
        return _exchange_and_add_(flat, p2p, halved_(flat, op, 2), scratch, piece_bytes)
    reduce_scatter_(flat, p2p, op, scratch=scratch, piece_bytes=piece_bytes)
    return all_gather_(flat, p2p, piece_bytes=piece_bytes)


def _exchange_and_add_(
    flat: Tensor, p2p: PointToPoint, op: ReduceOp, scratch: Tensor | None, piece_bytes: int
) -> Tensor:
    peer = 1 - p2p.rank
    pieces = (
        cut(flat, num_pieces(flat.numel(), flat.element_size(), piece_bytes))
        if flat.numel()
        else []
    )
    landing = (
        [places[0] for places in landing_places(pieces[0], WINDOW, 1, scratch)] if pieces else []
    )
    wide = torch.empty(2, min(_CHUNK, flat.numel()), dtype=torch.float32)
    under_way: deque[tuple[Tensor, list[Request]]] = deque()
    num_posted = 0
    for index, own in enumerate(pieces):
        for number in range(num_posted, min(index + WINDOW, len(pieces))):
            place = landing[number % WINDOW][: pieces[number].numel()]
            under_way.append((place, [p2p.irecv(place, peer), p2p.isend(pieces[number], peer)]))
            num_posted = number + 1
        arrived, requests = under_way.popleft()
        p2p.wait(requests)  # for the message that left too: its memory becomes the sum
        sum_into_(own, (own, arrived) if p2p.rank == 0 else (arrived, own), op, wide)
    return flat


def sums_halves(dtype: torch.dtype, op: object, world_size: int) -> bool:
    """Whether ``op`` is an average that is the sum of halves: that of two bfloat16 tensors."""
    return op is ReduceOp.AVG and dtype is torch.bfloat16 and world_size == 2


def halved_(flat: Tensor, op: ReduceOp, world_size: int) -> ReduceOp:
    """What is left of ``op`` to do: a sum, where ``flat`` is halved here, in place."""
    if not sums_halves(flat.dtype, op, world_size):
        return op
    flat.mul_(0.5)
    return ReduceOp.SUM


def sum_into_(
    target: Tensor, parts: Sequence[Tensor], op: ReduceOp, wide: Tensor | None = None
) -> None:
    """``target`` (it may be one of ``parts``) becomes their SUM or AVG; ``wide`` is float32
    memory for two chunks.
    """
    if op is ReduceOp.SUM and len(parts) == 2:
        torch.add(parts[0], parts[1], out=target)
        return
    if wide is None:
        wide = torch.empty(2, min(_CHUNK, target.numel()), dtype=torch.float32)
    scale = 2.0 ** -math.ceil(math.log2(len(parts))) if op is ReduceOp.AVG else 1.0
    rest = scale * len(parts) if op is ReduceOp.AVG else 1.0
    for start in range(0, target.numel(), _CHUNK):
        own = target[start : start + _CHUNK]
        total, arrived = wide[0, : own.numel()], wide[1, : own.numel()]
        total.copy_(parts[0][start : start + _CHUNK])
        # by a power of two, which is exact: bfloat16 reaches as far as float32, and must not
        # overflow it
        if scale < 1:
            total.mul_(scale)
        for part in parts[1:]:
            total.add_(arrived.copy_(part[start : start + _CHUNK]), alpha=scale)
        if rest != 1:
            total.div_(rest)
        own.copy_(total)
