"""The collectives among ranks that share memory, as steps of a `CollectiveQueue`: each ``yield``
waits for a round.

Operations are made in the order of the ranks, so that all ranks, and with real numbers both ways,
end with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from lightning_ring.comm.backends.shared_memory.memory import SLOT_BYTES, Regions, Rounds
from lightning_ring.comm.collective_queue import Steps
from lightning_ring.comm.communicator import ReduceOp
from lightning_ring.comm.exchange import sum_into_, wants_wide_sum
from lightning_ring.comm.ring import COMBINE, finish_

PIECE_BYTES = 256 * 1024  # summed and written to all ranks before it leaves the cache
# A shard up to this is one piece: two of them fit a second-level cache of 1 MiB.
WHOLE_BYTES = 512 * 1024


def reduce_rows(rows: Sequence[Tensor], out: Tensor, op: ReduceOp) -> None:
    """Reduce ``rows`` into ``out``, one of the first two or other memory. 16-bit sums are rounded
    once.
    """
    if out.itemsize == 2 and wants_wide_sum(out.dtype, op):
        sum_into_(out, rows, op)
        return
    combine = COMBINE[op]
    if len(rows) == 1:
        out.copy_(rows[0])
    else:
        combine(rows[0], rows[1], out=out)
        for row in rows[2:]:
            combine(out, row, out=out)
    if op is ReduceOp.AVG:
        finish_(out, op, len(rows))


def all_reduce_in_place(
    flat: Tensor, location: int, regions: Regions, rounds: Rounds, op: ReduceOp
) -> Steps:
    """Reduce all ranks' 1-D ``flat`` at ``location`` into all of them. Begins after a round."""
    shards = regions.all_ranks(flat, location, rounds.rank)
    # A shortcut of the loop below.
    if len(shards) == 2 and shards[0].nbytes <= WHOLE_BYTES:
        own = shards[rounds.rank]
        reduce_rows(shards, own, op)
        shards[1 - rounds.rank].copy_(own)
    else:
        for pieces, result in _reduced_pieces(shards, rounds.rank, op):
            for piece in pieces:
                if piece is not result:
                    piece.copy_(result)
    yield rounds.arrive()


def reduce_scatter_in_place(
    flat: Tensor, location: int, regions: Regions, rounds: Rounds, op: ReduceOp
) -> Steps:
    """As `all_reduce_in_place`, into this rank's shard of its own tensor."""
    shards = regions.all_ranks(flat, location, rounds.rank)
    for pieces, result in _reduced_pieces(shards, rounds.rank, op):
        if pieces[rounds.rank] is not result:
            pieces[rounds.rank].copy_(result)
    yield rounds.arrive()


def all_gather_in_place(
    flat: Tensor, location: int, regions: Regions, rounds: Rounds, _: object = None
) -> Steps:
    """Fill this rank's tensor from the others' shards of theirs. Begins after a round."""
    for peer in range(rounds.world_size):
        if peer != rounds.rank:
            shards = regions.all_ranks(flat, location, peer)
            shards[rounds.rank].copy_(shards[peer])
    yield rounds.arrive()


def broadcast_in_place(
    flat: Tensor, location: int, regions: Regions, rounds: Rounds, src: int
) -> Steps:
    """Copy rank ``src``'s tensor into this rank's. Begins after a round."""
    if rounds.rank != src:
        flat.copy_(regions.all_ranks(flat, location)[src])
    yield rounds.arrive()


def all_reduce_through_slots(flat: Tensor, rounds: Rounds, op: ReduceOp) -> Steps:
    """Reduce 1-D ``flat`` in place."""
    # Otherwise every rank would read every byte.
    if rounds.world_size > 2 and flat.nbytes > SLOT_BYTES:
        yield from reduce_scatter_through_slots(flat, rounds, op)
        yield from all_gather_through_slots(flat, rounds)
        return
    for piece in _slotfuls(flat):
        slots = rounds.next_slots(flat.dtype, piece.numel())
        slots[rounds.rank].copy_(piece)
        yield rounds.arrive()
        if op is ReduceOp.SUM and rounds.world_size == 2:
            # the same bits in either order, in two thirds of the time
            piece.add_(slots[1 - rounds.rank])
        else:
            reduce_rows(slots, piece, op)


def reduce_scatter_through_slots(flat: Tensor, rounds: Rounds, op: ReduceOp) -> Steps:
    """Reduce 1-D ``flat``'s shard of this rank in place. A slot holds a piece of every shard."""
    world_size, rank = rounds.world_size, rounds.rank
    numel = SLOT_BYTES // world_size // 64 * 64 // flat.element_size()
    shards = [own.split(numel) for own in flat.tensor_split(world_size)]
    for index in range(len(shards[0])):  # the first shard is never shorter than another
        slots = rounds.next_slots(flat.dtype, numel * world_size)
        for peer, pieces in enumerate(shards):
            if peer != rank and index < len(pieces):
                slots[rank][peer * numel :][: pieces[index].numel()].copy_(pieces[index])
        yield rounds.arrive()
        if index < len(shards[rank]):
            mine = shards[rank][index]
            rows = [slot[rank * numel :][: mine.numel()] for slot in slots]
            rows[rank].copy_(mine)  # nobody else reads this part of it
            reduce_rows(rows, mine, op)


def all_gather_through_slots(flat: Tensor, rounds: Rounds, _: object = None) -> Steps:
    """Fill 1-D ``flat`` from the ranks' shards of it."""
    world_size, rank = rounds.world_size, rounds.rank
    numel = SLOT_BYTES // flat.element_size()
    shards = [own.split(numel) for own in flat.tensor_split(world_size)]
    for index in range(len(shards[0])):
        slots = rounds.next_slots(flat.dtype, numel)
        if index < len(shards[rank]):
            slots[rank][: shards[rank][index].numel()].copy_(shards[rank][index])
        yield rounds.arrive()
        for peer, pieces in enumerate(shards):
            if peer != rank and index < len(pieces):
                pieces[index].copy_(slots[peer][: pieces[index].numel()])


def broadcast_through_slots(flat: Tensor, rounds: Rounds, src: int) -> Steps:
    """Replace 1-D ``flat`` by rank ``src``'s."""
    for piece in _slotfuls(flat):
        slot = rounds.next_slots(flat.dtype, piece.numel())[src]
        if rounds.rank == src:
            slot.copy_(piece)
        yield rounds.arrive()
        if rounds.rank != src:
            piece.copy_(slot)


def exchange_rows(rows: Tensor, rounds: Rounds) -> Steps:
    """Fill ``rows`` (world size × k, at most a slot each), each from its rank."""
    slots = rounds.next_slots(rows.dtype, rows.shape[1])
    slots[rounds.rank].copy_(rows[rounds.rank])
    yield rounds.arrive()
    for row, slot in zip(rows, slots, strict=True):
        row.copy_(slot)


def all_to_all_through_slots(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], rounds: Rounds, longest: int
) -> Steps:
    """Send ``inputs[r]`` to rank r, and fill ``outputs[r]`` from it: uint8, up to ``longest``
    bytes.
    """
    part = SLOT_BYTES // rounds.world_size
    for start in range(0, longest, part):
        slots = rounds.slots[(rounds.number + 1) & 1]
        for peer, given in enumerate(inputs):
            piece = given[start : start + part]
            slots[rounds.rank][peer * part :][: piece.numel()].copy_(piece)
        yield rounds.arrive()
        for peer, wanted in enumerate(outputs):
            piece = wanted[start : start + part]
            piece.copy_(slots[peer][rounds.rank * part :][: piece.numel()])


def _slotfuls(flat: Tensor) -> Sequence[Tensor]:
    return (flat,) if flat.nbytes <= SLOT_BYTES else flat.split(SLOT_BYTES // flat.element_size())


def _reduced_pieces(
    shards: Sequence[Tensor], rank: int, op: ReduceOp
) -> Iterator[tuple[Sequence[Tensor], Tensor]]:
    """Every piece of ``shards`` (one a rank) and its result, for two ranks in this rank's piece."""
    numel = PIECE_BYTES // shards[0].element_size()
    scratch = shards[0].new_empty(min(numel, shards[0].numel())) if len(shards) > 2 else None
    cut = (
        [shards]
        if shards[0].numel() <= numel
        else zip(*(flat.split(numel) for flat in shards), strict=True)
    )
    for pieces in cut:
        result = pieces[rank] if scratch is None else scratch[: pieces[0].numel()]
        reduce_rows(pieces, result, op)
        yield pieces, result
