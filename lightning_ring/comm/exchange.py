"""Collectives without a ring, over the same send and receive: direct exchange, broadcast,
all-to-all, and sums of 16-bit tensors.

16-bit tensors are summed in float32 and rounded once, where a ring would round at every hop.
Everybody sends everybody's shard straight to its owner, which takes the same bytes on the wire as
the ring does: (N−1)/N of the tensor. The owner adds them in the order of the ranks, so that the
result does not depend on who owns it.

Of two values, one addition in 16 bits is that sum: torch adds in float32 and rounds the result. An
average of bfloat16 is then the sum of halves, which are exact except below 2⁻¹²⁵.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_ring.comm.communicator import ReduceOp, shard
from lightning_ring.comm.ring import (
    COMBINE,
    PIECE_BYTES,
    WINDOW,
    all_gather_,
    cut,
    finish_,
    landing_places,
    num_pieces,
)
from lightning_ring.comm.ring import (
    reduce_scatter_ as ring_reduce_scatter_,
)
from lightning_ring.comm.transport import PointToPoint, Request

DIRECT_BYTES = 16 * 1024  # per rank; up to this a reduction is one message to everybody
# Two ranks send as many bytes as by a ring, in half as many messages. Longer tensors are summed
# while they arrive.
PAIR_BYTES = 2 * 1024 * 1024
_FIRST_DIRECT_TAG = 16
# Two float32 buffers of so many elements stay in the second-level cache.
_CHUNK = 64 * 1024


def exchange_rows(rows: Tensor | Sequence[Tensor], p2p: PointToPoint) -> None:
    """Fill ``rows``, each from its rank, in one message time."""
    if requests := start_exchange(rows, p2p):
        p2p.wait(requests)


def start_exchange(
    rows: Tensor | Sequence[Tensor], p2p: PointToPoint, tag: int = 0
) -> list[Request]:
    """The messages of `exchange_rows`, under way. Empty rows are not sent."""
    others = [peer for peer in range(p2p.world_size) if peer != p2p.rank]
    requests = [p2p.irecv(rows[peer], peer, tag) for peer in others if rows[peer].numel()]
    own = rows[p2p.rank]
    return requests + ([p2p.isend(own, peer, tag) for peer in others] if own.numel() else [])


def all_gather_directly_(flat: Tensor, p2p: PointToPoint) -> None:
    """Fill a short 1-D ``flat`` from the ranks' shards, in one message time."""
    exchange_rows([shard(flat, p2p.world_size, rank) for rank in range(p2p.world_size)], p2p)


def goes_directly(flat: Tensor, world_size: int) -> bool:
    """Whether an all-reduce sends the whole of ``flat`` straight to every other rank."""
    if world_size == 2:
        return flat.nbytes <= PAIR_BYTES
    return flat.nbytes * (world_size - 1) <= DIRECT_BYTES


def start_all_reduce_directly(
    flat: Tensor, p2p: PointToPoint, op: ReduceOp, tag: int = 0
) -> tuple[list[Request], Callable[[], object]]:
    """Messages under way, and what then reduces 1-D ``flat``, in the order of the ranks.

    One message time instead of the ring's 2·(N−1), for N−1 times the bytes. A ``tag`` of 0 stands
    for one by size: Gloo aborts a process that gets more bytes than it has room for.
    """
    if p2p.world_size == 2:
        if op is ReduceOp.AVG and flat.dtype in (torch.float32, torch.float64):
            # DistributedDataParallel's bits: a sum of large values would overflow
            flat.mul_(0.5)
            op = ReduceOp.SUM
        rows = [flat, flat.new_empty(flat.numel())]  # `flat` is read before it is written
        if p2p.rank == 1:
            rows.reverse()
    else:
        rows = [flat.new_empty(flat.numel()) for _ in range(p2p.world_size)]
        rows[p2p.rank].copy_(flat)
    requests = start_exchange(rows, p2p, tag or _FIRST_DIRECT_TAG + flat.nbytes)

    def reduce() -> None:
        if wants_wide_sum(flat.dtype, op):
            sum_into_(flat, rows, op)
            return
        COMBINE[op](rows[0], rows[1], out=flat)
        for row in rows[2:]:
            COMBINE[op](flat, row, out=flat)
        finish_(flat, op, p2p.world_size)

    return requests, reduce


def all_reduce_directly_(flat: Tensor, p2p: PointToPoint, op: ReduceOp = ReduceOp.SUM) -> Tensor:
    """Reduce a short 1-D ``flat``."""
    if p2p.world_size > 1:
        requests, reduce = start_all_reduce_directly(flat, p2p, op)
        p2p.wait(requests)
        reduce()
    return flat


def broadcast_(
    flat: Tensor, p2p: PointToPoint, src: int = 0, *, piece_bytes: int = PIECE_BYTES
) -> Tensor:
    """Replace 1-D ``flat`` by rank ``src``'s: straight if short, else down a chain in pieces."""
    world_size, rank = p2p.world_size, p2p.rank
    if world_size == 1 or flat.numel() == 0:
        return flat
    pieces = cut(flat, num_pieces(flat.numel(), flat.element_size(), piece_bytes))
    if len(pieces) == 1 and rank == src:
        p2p.wait([p2p.isend(flat, peer) for peer in range(world_size) if peer != src])
    elif len(pieces) == 1:
        p2p.wait((p2p.irecv(flat, src),))
    else:
        _pass_down(p2p, pieces, src)
    return flat


def _pass_down(p2p: PointToPoint, pieces: list[Tensor], src: int) -> None:
    world_size, rank = p2p.world_size, p2p.rank
    following = (rank + 1) % world_size
    receives = (
        [] if rank == src else [p2p.irecv(piece, (rank - 1) % world_size) for piece in pieces]
    )
    sends: list[Request] = []
    for index, piece in enumerate(pieces):
        if receives:
            p2p.wait((receives[index],))
        if following != src:
            sends.append(p2p.isend(piece, following))
    p2p.wait(sends)


def all_to_all(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    p2p: PointToPoint,
    *,
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Send ``inputs[r]`` to rank r, and fill ``outputs[r]`` from it (1-D)."""
    outputs[p2p.rank].copy_(inputs[p2p.rank])
    peers = [peer for peer in range(p2p.world_size) if peer != p2p.rank]
    receives = [
        p2p.irecv(piece, peer) for peer in peers for piece in _sendable(outputs[peer], piece_bytes)
    ]
    sends = [
        p2p.isend(piece, peer) for peer in peers for piece in _sendable(inputs[peer], piece_bytes)
    ]
    p2p.wait(receives + sends)


def _sendable(flat: Tensor, piece_bytes: int) -> list[Tensor]:
    return (
        cut(flat, num_pieces(flat.numel(), flat.element_size(), piece_bytes))
        if flat.numel()
        else []
    )


def reduce_scatter_(
    flat: Tensor, p2p: PointToPoint, op: ReduceOp, scratch: Tensor | None = None
) -> Tensor:
    """Reduce 1-D ``flat``: rank r's shard then holds the result. ``scratch`` is uint8 memory of
    `ring.scratch_bytes`.
    """
    wide = wants_wide_sum(flat.dtype, op)
    way = wide_reduce_scatter_ if wide else ring_reduce_scatter_
    return way(flat, p2p, op, scratch=scratch)


def all_reduce_(
    flat: Tensor, p2p: PointToPoint, op: ReduceOp, scratch: Tensor | None = None
) -> Tensor:
    """Reduce 1-D ``flat`` in place. All ranks end with the same bits."""
    return all_gather_(reduce_scatter_(flat, p2p, op, scratch), p2p)


def wants_wide_sum(dtype: torch.dtype, op: ReduceOp) -> bool:
    return dtype in (torch.float16, torch.bfloat16) and op in (ReduceOp.SUM, ReduceOp.AVG)


def wide_reduce_scatter_(
    flat: Tensor,
    p2p: PointToPoint,
    op: ReduceOp,
    *,
    scratch: Tensor | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> Tensor:
    """Reduce 16-bit 1-D ``flat`` by SUM or AVG in place: rank r's shard then holds the result, the
    rest is untouched.

    A piece is summed while the next one arrives.
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


def sums_halves(dtype: torch.dtype, op: object, world_size: int) -> bool:
    """Whether ``op`` is an average that is the sum of halves."""
    return op is ReduceOp.AVG and dtype is torch.bfloat16 and world_size == 2


def halved_(flat: Tensor, op: ReduceOp, world_size: int) -> ReduceOp:
    """The rest of ``op``: a sum, if ``flat`` is halved here, in place."""
    if not sums_halves(flat.dtype, op, world_size):
        return op
    flat.mul_(0.5)
    return ReduceOp.SUM


def sum_into_(
    target: Tensor, parts: Sequence[Tensor], op: ReduceOp, wide: Tensor | None = None
) -> None:
    """``target`` (perhaps one of ``parts``) becomes their SUM or AVG; ``wide`` is float32 scratch
    for two chunks.
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
        # A power of two is exact. bfloat16 reaches as far as float32, and must not overflow it.
        if scale < 1:
            total.mul_(scale)
        for part in parts[1:]:
            total.add_(arrived.copy_(part[start : start + _CHUNK]), alpha=scale)
        if rest != 1:
            total.div_(rest)
        own.copy_(total)
