"""Collectives without a ring, over the same send and receive: direct exchange, broadcast,
all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_ring.comm.communicator import ReduceOp, shard
from lightning_ring.comm.ring import (
    COMBINE,
    PIECE_BYTES,
    cut,
    finish_,
    num_pieces,
    prepare_,
)
from lightning_ring.comm.transport import PointToPoint, Request
from lightning_ring.comm.wide_sum import sum_into_, wants_wide_sum


def exchange_rows(rows: Tensor | Sequence[Tensor], p2p: PointToPoint) -> None:
    """Fill ``rows``, one a rank: this rank's row goes to every other rank, theirs come here. One
    message time.
    """
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
    """Fill a short 1-D ``flat`` from the ranks' shards of it, in one message time instead of the
    ring's N−1.
    """
    exchange_rows([shard(flat, p2p.world_size, rank) for rank in range(p2p.world_size)], p2p)


def all_reduce_directly_(flat: Tensor, p2p: PointToPoint, op: ReduceOp = ReduceOp.SUM) -> Tensor:
    """Reduce a short 1-D ``flat``: each rank sends all of it to each other rank and reduces in the
    order of the ranks.

    One message time instead of the ring's 2·(N−1), for N−1 times the bytes.
    """
    world_size = p2p.world_size
    if world_size == 1:
        return flat
    if not wants_wide_sum(flat.dtype, op):
        prepare_(flat, op, world_size)
    rows = flat.new_empty(world_size, flat.numel())
    rows[p2p.rank] = flat
    exchange_rows(rows, p2p)
    if wants_wide_sum(flat.dtype, op):
        sum_into_(flat, list(rows), op)
        return flat
    flat.copy_(rows[0])
    for row in rows[1:]:
        COMBINE[op](flat, row, out=flat)
    finish_(flat, op, world_size)
    return flat


def broadcast_(
    flat: Tensor, p2p: PointToPoint, src: int = 0, *, piece_bytes: int = PIECE_BYTES
) -> Tensor:
    """Replace 1-D ``flat`` by rank ``src``'s. Short: straight to every rank. Long: down a chain,
    piece behind piece.
    """
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
    """Rank r gets this rank's ``inputs[r]``, and ``outputs[r]`` (1-D) becomes what rank r has
    for this rank.
    """
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
