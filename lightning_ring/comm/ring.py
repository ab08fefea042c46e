"""The ring, written once over send and receive: a reduce-scatter, an all-gather, and both in a row.

Every rank sends to the next and receives from the one before it, so that each link carries the same
bytes whatever the number of ranks: 2·(N−1)/N of the tensor for an all-reduce. Source: Patarasuk and
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib.
Comput. 69 (2009). Chunks travel as small pieces, several at a time: a rank sums one piece while the
next one arrives, and no message is longer than transports like.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_ring.comm.communicator import ReduceOp, shard, shard_bounds
from lightning_ring.comm.transport import PointToPoint, Request
from lightning_ring.errors import ConfigurationError

# measured over MPI and Gloo on one node: 256 KiB take twice as long, 4 MiB gain nothing
PIECE_BYTES = 1024 * 1024
WINDOW = 4  # pieces under way in each direction

COMBINE: dict[ReduceOp, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
}
_REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGER = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_COMPLEX = (torch.complex64, torch.complex128)
_REDUCIBLE = {
    **dict.fromkeys(_REAL + _INTEGER, tuple(ReduceOp)),
    **dict.fromkeys(_COMPLEX, (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT)),
    torch.bool: (ReduceOp.MIN, ReduceOp.MAX),
}


def reduce_scatter_(
    flat: Tensor,
    p2p: PointToPoint,
    op: ReduceOp = ReduceOp.SUM,
    *,
    piece_bytes: int = PIECE_BYTES,
    scratch: Tensor | None = None,
) -> Tensor:
    """Reduce 1-D ``flat`` in place so that rank r's shard holds the result; the rest of it is left
    half-summed.

    N−1 steps. The chunk that ends at rank r starts at rank r+1 and is summed on its way around, so
    that its summation order is one and the same for all who receive it later. ``scratch`` is uint8
    memory of at least `scratch_bytes`.
    """
    world_size, rank = p2p.world_size, p2p.rank
    if world_size == 1:
        return flat
    prepare_(flat, op, world_size)
    pieces = _cut(flat, world_size, piece_bytes)
    # the first shard's first piece is never shorter than another
    landing = [place for (place,) in landing_places(pieces[0][0], WINDOW, 1, scratch)]
    _pass_around(p2p, pieces, (rank - 1) % world_size, landing, COMBINE[op])
    finish_(shard(flat, world_size, rank), op, world_size)
    return flat


def all_gather_(flat: Tensor, p2p: PointToPoint, *, piece_bytes: int = PIECE_BYTES) -> Tensor:
    """Fill 1-D ``flat`` from the ranks' shards of it, in N−1 steps."""
    if p2p.world_size > 1:
        _pass_around(p2p, _cut(flat, p2p.world_size, piece_bytes), p2p.rank, None, None)
    return flat


def all_reduce_(
    flat: Tensor,
    p2p: PointToPoint,
    op: ReduceOp = ReduceOp.SUM,
    *,
    piece_bytes: int = PIECE_BYTES,
    scratch: Tensor | None = None,
) -> Tensor:
    """Reduce 1-D ``flat`` in place. Each shard is summed on one path only, so all ranks end with
    the same bits.
    """
    reduce_scatter_(flat, p2p, op, piece_bytes=piece_bytes, scratch=scratch)
    return all_gather_(flat, p2p, piece_bytes=piece_bytes)


def scratch_bytes(piece_bytes: int = PIECE_BYTES) -> int:
    """Memory in which arriving pieces land during a `reduce_scatter_`."""
    # a piece is rounded up to a whole element, of at most 16 bytes
    return WINDOW * (piece_bytes + 16)


def check_reducible(tensor: Tensor, op: ReduceOp) -> None:
    """Raise `ConfigurationError` if ``op`` means nothing for this dtype."""
    if op not in _REDUCIBLE.get(tensor.dtype, ()):
        able = ", ".join(
            str(dtype).removeprefix("torch.") for dtype, ops in _REDUCIBLE.items() if op in ops
        )
        raise ConfigurationError(
            f"cannot reduce {tensor.dtype} by {op.name}. {op.name} takes {able}; convert the "
            "tensor first."
        )


def prepare_(contribution: Tensor, op: ReduceOp, world_size: int) -> None:
    """The part of ``op`` that each rank does to its own values first."""
    if op is ReduceOp.AVG and divides_first(contribution.dtype):
        contribution.div_(world_size)


def finish_(reduced: Tensor, op: ReduceOp, world_size: int) -> None:
    """The part of ``op`` that is done once, to the sum."""
    if op is ReduceOp.AVG and not divides_first(reduced.dtype):
        integer = not (reduced.is_floating_point() or reduced.is_complex())
        reduced.div_(world_size, rounding_mode="trunc" if integer else None)


def divides_first(dtype: torch.dtype) -> bool:
    """16-bit sums overflow where their average would not; wider ones are divided once, after the
    sum.
    """
    return dtype in (torch.float16, torch.bfloat16)


def cut(tensor: Tensor, num_pieces: int) -> list[Tensor]:
    """``num_pieces`` views of a 1-D tensor, of lengths that differ by one at most."""
    bounds = (shard_bounds(tensor.numel(), num_pieces, piece) for piece in range(num_pieces))
    return [tensor[start:stop] for start, stop in bounds]


def num_pieces(numel: int, itemsize: int, piece_bytes: int) -> int:
    return max(1, -(-numel * itemsize // piece_bytes))


def _cut(flat: Tensor, world_size: int, piece_bytes: int) -> list[list[Tensor]]:
    """The pieces of every chunk: as many in each, so that step and piece are known from a
    running number.
    """
    longest = -(-flat.numel() // world_size)
    count = num_pieces(longest, flat.element_size(), piece_bytes)
    return [cut(shard(flat, world_size, rank), count) for rank in range(world_size)]


def landing_places(
    longest: Tensor, window: int, num_peers: int, scratch: Tensor | None
) -> list[list[Tensor]]:
    """For each piece under way, memory as long as ``longest`` for every peer: of ``scratch``,
    where that is enough.
    """
    num_bytes = longest.numel() * longest.element_size()
    if scratch is None or scratch.numel() < window * num_peers * num_bytes:
        scratch = torch.empty(window * num_peers * num_bytes, dtype=torch.uint8)
    flat = scratch[: window * num_peers * num_bytes].view(longest.dtype)
    places = list(flat.view(window * num_peers, -1)) if num_bytes else [flat] * (window * num_peers)
    return [places[slot * num_peers : (slot + 1) * num_peers] for slot in range(window)]


def _pass_around(
    p2p: PointToPoint,
    pieces: list[list[Tensor]],
    first: int,
    landing: list[Tensor] | None,
    combine: Callable[..., Tensor] | None,
) -> None:
    """Send chunks ``first``, ``first - 1``, … onward while ``first - 1``, ``first - 2``, … come
    from the previous rank.

    What arrives in one step is sent in the next: piece p of step s+1 leaves as soon as piece p of
    step s is here. With ``combine`` pieces land beside ``pieces`` and are reduced into them,
    without it they land in place.
    """
    world_size = p2p.world_size
    following, previous = (p2p.rank + 1) % world_size, (p2p.rank - 1) % world_size
    order = [(first - step) % world_size for step in range(world_size)]
    outgoing = [piece for chunk in order[:-1] for piece in pieces[chunk]]
    incoming = [piece for chunk in order[1:] for piece in pieces[chunk]]
    per_step = len(pieces[0])
    sends: list[Request] = []
    arriving: deque[tuple[Tensor, Request | None]] = deque()
    num_posted = num_sent = 0
    for index, target in enumerate(incoming):
        while num_posted < min(index + WINDOW, len(incoming)):
            place = incoming[num_posted]
            if landing is not None:
                place = landing[num_posted % WINDOW][: place.numel()]
            arriving.append((place, p2p.irecv(place, previous) if place.numel() else None))
            num_posted += 1
        while num_sent < min(index + WINDOW, index + per_step, len(outgoing)):
            if outgoing[num_sent].numel():
                sends.append(p2p.isend(outgoing[num_sent], following))
            num_sent += 1
        place, request = arriving.popleft()
        if request is not None:
            p2p.wait((request,))
            if combine is not None:
                combine(target, place, out=target)
    p2p.wait(sends)


class PaddedRows:
    """1-D ``flat`` as equal rows, one a shard: its own memory or, where shards differ in length,
    a padded copy.
    """

    def __init__(self, flat: Tensor, num_rows: int) -> None:
        self._source = flat
        self._length, self._num_longer = divmod(flat.numel(), num_rows)
        self._num_rows = num_rows
        self.flat = flat if not self._num_longer else flat.new_zeros(num_rows * (self._length + 1))

    def __getitem__(self, index: int) -> Tensor:
        return shard(self.flat, self._num_rows, index)

    def load(self, index: int | None = None) -> None:
        """Copy into row ``index``, or all rows, from the tensor."""
        for row, source in self._pairs(index):
            row.copy_(source)

    def store(self, index: int | None = None) -> None:
        for row, source in self._pairs(index):
            source.copy_(row)

    def _pairs(self, index: int | None) -> list[tuple[Tensor, Tensor]]:
        """Rows beside the parts of the tensor that they stand for; none if they are the same
        memory.
        """
        if not self._num_longer:
            return []
        if index is not None:
            part = shard(self._source, self._num_rows, index)
            return [(self[index][: part.numel()], part)]
        rows = self.flat.view(self._num_rows, self._length + 1)
        boundary = self._num_longer * (self._length + 1)
        return [
            (
                rows[: self._num_longer],
                self._source[:boundary].view(self._num_longer, self._length + 1),
            ),
            (
                rows[self._num_longer :, : self._length],
                self._source[boundary:].view(self._num_rows - self._num_longer, self._length),
            ),
        ]
