"""Ranks cut their shards for the ranks that there are now, from what they held before; newcomers
get all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ring.algorithms.sharded.inventory import Inventory, Span
from lightning_ring.comm.communicator import Communicator, as_bytes
from lightning_ring.comm.differences import digests_of
from lightning_ring.comm.outline import TensorSpec, filled, outline, specs_in

ROUND_BYTES = 250 * 2**20  # that are sent at once
_ALIGNMENT = 16  # bytes


@dataclass(frozen=True, slots=True)
class _HeldPart:
    """A part that its rank steps: weight and state without their tensors, and these tensors'
    digests.
    """

    span: Span
    outlined: Any
    digests: list[str] | None


@dataclass(frozen=True, slots=True)
class _Request:
    """``span`` of entry number ``entry`` of rank ``source``, with the weight if ``target`` is a
    newcomer.
    """

    target: int
    source: int
    entry: int
    span: Span
    weight: bool


class LettingIn:
    """One exchange among all ranks of ``comm``.

    Args:
        inventory: What this rank holds. A newcomer's may be wrong, or lack anything.
        weight_of: This rank's memory of a part of a parameter, 1-D.
        device: Where messages are put together.
        receives: Whether this rank is a newcomer.
    """

    def __init__(
        self,
        comm: Communicator,
        inventory: Inventory,
        weight_of: Callable[[Span], Tensor],
        device: torch.device,
        *,
        receives: bool,
    ) -> None:
        self._comm = comm
        self._inventory = inventory
        self._weight_of = weight_of
        self._device = device
        self._receives = receives
        self._tensors: list[list[Tensor]] = []  # of each entry of this rank
        self._catalog: list[list[_HeldPart]] = []  # by rank
        self.sent = self.of = 0  # bytes that newcomers got, and bytes of the whole

    @torch.no_grad()
    def run(self, own: Sequence[Span], wanted: Sequence[Span], *, compares: bool) -> None:
        """Make the inventory hold ``wanted``; that of newcomers all, as it is on the rank that
        steps it. Collective.

        Args:
            own: The parts that this rank has stepped; each part of the whole is that of one rank.
            compares: Whether some newcomer has an inventory: it keeps the parts that have the
                digests of the ranks'.
        """
        self._tensors = [[] for _ in own]
        entries = [
            self._entry(*pair, digests=compares) for pair in zip(own, self._tensors, strict=True)
        ]
        # before it knows those of the ranks: they make theirs meanwhile
        held = self._held({span.index for span in wanted}) if self._receives and compares else {}
        self._catalog = self._comm.all_gather_object(entries, name="catalog of state")
        mine = list(self._differing(held) if self._receives else self._lacking(wanted))
        requests = [
            request
            for asked in self._comm.all_gather_object(mine, name="requests for state")
            for request in asked
        ]
        self._count(requests)
        for together in self._rounds(requests):
            self._exchange(together)

    def _entry(self, span: Span, tensors: list[Tensor], *, digests: bool) -> _HeldPart:
        """Appends its tensors to ``tensors``."""
        outlined = outline((self._weight_of(span), self._inventory.get(span)), tensors)
        return _HeldPart(span, outlined, digests_of(tensors) if digests else None)

    def _held(self, indices: set[int]) -> dict[Span, _HeldPart]:
        """What a newcomer has got of the parameters with these ``indices``, with digests."""
        return {
            span: self._entry(span, [], digests=True)
            for span in self._inventory.spans()
            if span.index in indices
        }

    def _differing(self, held: Mapping[Span, _HeldPart]) -> Iterator[_Request]:
        for source, entries in enumerate(self._catalog):
            for number, entry in enumerate(entries):
                if held.get(entry.span) != entry:
                    yield _Request(self._comm.rank, source, number, entry.span, weight=True)

    def _lacking(self, wanted: Sequence[Span]) -> Iterator[_Request]:
        owners: dict[int, list[tuple[Span, int, int]]] = {}
        for source, entries in enumerate(self._catalog):
            for number, entry in enumerate(entries):
                owners.setdefault(entry.span.index, []).append((entry.span, source, number))
        gaps = {gap for span in wanted for gap in self._inventory.missing(span)}
        for gap in sorted(gaps):
            for span, source, number in owners[gap.index]:
                first, end = max(gap.first, span.first), min(gap.end, span.end)
                if first < end:
                    yield _Request(
                        self._comm.rank,
                        source,
                        number,
                        Span(gap.index, first, end - first),
                        weight=False,
                    )

    def _count(self, requests: Sequence[_Request]) -> None:
        asked = {(request.source, request.entry) for request in requests if request.weight}
        for source, entries in enumerate(self._catalog):
            for number, entry in enumerate(entries):
                size = sum(
                    spec.dtype.itemsize * math.prod(spec.shape) for spec in specs_in(entry.outlined)
                )
                self.of += size
                self.sent += size * ((source, number) in asked)

    def _rounds(self, requests: Sequence[_Request]) -> Iterator[list[_Request]]:
        together: list[_Request] = []
        size = 0
        for request in requests:
            if together and size + self._size(request) > ROUND_BYTES:
                yield together
                together, size = [], 0
            together.append(request)
            size += self._size(request)
        if together:
            yield together

    def _exchange(self, requests: Sequence[_Request]) -> None:
        ranks, mine = range(self._comm.world_size), self._comm.rank
        to = [
            [asked for asked in requests if (asked.source, asked.target) == (mine, rank)]
            for rank in ranks
        ]
        of = [
            [asked for asked in requests if (asked.source, asked.target) == (rank, mine)]
            for rank in ranks
        ]
        inputs = [self._packed(asked) for asked in to]
        outputs = [self._memory(asked) for asked in of]
        self._comm.all_to_all(inputs, outputs, name="shards for ranks that come").wait()
        for asked, received in zip(of, outputs, strict=True):
            self._unpack(asked, received)

    def _packed(self, requests: Sequence[_Request]) -> Tensor:
        flat, start = self._memory(requests), 0
        for request in requests:
            tensors, skipped = self._tensors[request.entry], self._skipped(request)
            for spec in self._specs(request):
                tensor = tensors[spec.index].detach()
                if tensor.dim() == 1:
                    tensor = tensor[skipped : skipped + request.span.numel]
                flat[start : start + tensor.nbytes].copy_(as_bytes(tensor.contiguous()))
                start += _padded(tensor.nbytes)
        return flat

    def _unpack(self, requests: Sequence[_Request], flat: Tensor) -> None:
        start = 0
        for request in requests:
            entry = self._catalog[request.source][request.entry]
            tensors = [torch.empty(0)] * len(specs_in(entry.outlined))
            for spec in self._specs(request):
                nbytes = self._nbytes(spec, request)
                data = flat[start : start + nbytes].to(
                    flat.device if spec.on_accelerator else "cpu", copy=True
                )
                shape = (request.span.numel,) if len(spec.shape) == 1 else spec.shape
                tensors[spec.index] = data.view(spec.dtype).view(shape)
                start += _padded(nbytes)
            if request.weight:
                self._weight_of(request.span).copy_(tensors[0])
            _, state = filled(entry.outlined, tensors)
            self._inventory.add(request.span, state)

    def _memory(self, requests: Sequence[_Request]) -> Tensor:
        return torch.empty(sum(map(self._size, requests)), dtype=torch.uint8, device=self._device)

    def _size(self, request: _Request) -> int:
        return sum(_padded(self._nbytes(spec, request)) for spec in self._specs(request))

    def _specs(self, request: _Request) -> list[TensorSpec]:
        """Of the tensors that are sent. The first one is the weight."""
        specs = specs_in(self._catalog[request.source][request.entry].outlined)
        return specs if request.weight else specs[1:]

    def _skipped(self, request: _Request) -> int:
        """Elements of the entry before those that are asked for."""
        return request.span.first - self._catalog[request.source][request.entry].span.first

    @staticmethod
    def _nbytes(spec: TensorSpec, request: _Request) -> int:
        numel = request.span.numel if len(spec.shape) == 1 else math.prod(spec.shape)
        return numel * spec.dtype.itemsize


def _padded(nbytes: int) -> int:
    """So that each tensor begins where its dtype can be read."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
