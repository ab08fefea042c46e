"""Compressors that send a flat tensor of gradients as one message of their own, between nodes
where there are any.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_ring.comm.communicator import ChainedWork, Communicator, ReduceOp, Work
from lightning_ring.errors import check_arguments
from lightning_ring.gradients.compression.compressor import Compressor, counterpart
from lightning_ring.gradients.compression.error_feedback import keep_if_finite

MIN_NUMEL = 4096  # 16 KiB of float32: the most that an all-reduce sends as one message to everybody
_ROW_BYTES = 128


@dataclass(slots=True)
class Part:
    """What a rank averages with other ranks: ``flat``, or on nested rings its part of the node's
    average.

    Attributes:
        whole: The tensor that `Compressor.all_reduce` was called with.
        values: The part of it, a view. An average takes its place.
        group: The ranks to average over.
        lost: Filled with the part of ``values`` that does not travel; `None` if nobody asks.
        updates: State, and what it becomes if the average is finite.
    """

    whole: Tensor
    values: Tensor
    group: Communicator
    lost: Tensor | None
    name: str
    updates: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def of(self, tensor: Tensor) -> Tensor:
        """The same part of ``tensor``, which has the size of ``whole``."""
        return counterpart(tensor, self.whole, self.values)

    def cut(self, bounds: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """What is in ``values`` of stretches of ``whole``: starts and ends there, empty ones
        left out.
        """
        before = int(self.values.storage_offset() - self.whole.storage_offset())
        size = self.values.numel()
        inside = [(max(start - before, 0), min(end - before, size)) for start, end in bounds]
        return [(start, end) for start, end in inside if start < end]


class BetweenNodes(Compressor):
    """A compressor whose messages join one rank of each node; inside a node gradients travel in
    full precision.

    Where the communicator has no nested rings (`Communicator.is_nested`), all ranks exchange
    compressed messages. A subclass writes `average`.

    Args:
        min_numel: A bucket with fewer gradients travels as it is: its size is a matter of latency.

    Raises:
        ConfigurationError: An argument cannot work.
    """

    def __init__(self, min_numel: int = MIN_NUMEL) -> None:
        works = type(min_numel) is int and min_numel >= 0
        check_arguments(type(self).__name__, works, "0 or more gradients", min_numel=min_numel)
        self.min_numel = min_numel

    @abstractmethod
    def average(self, part: Part) -> Iterator[Work]:
        """Replace ``part.values`` by its average over ``part.group``. Yields each collective that
        it has to wait for.

        On nested rings it runs in another thread than the training.
        """

    def all_reduce(
        self, flat: Tensor, comm: Communicator, *, lost: Tensor | None = None, name: str = ""
    ) -> Work:
        if flat.numel() < max(self.min_numel, 1):
            if lost is not None:
                lost.zero_()
            return comm.all_reduce_(flat, op=ReduceOp.AVG, name=name)
        parts: list[Part] = []

        def start(values: Tensor, group: Communicator) -> Work:
            error = None if lost is None else torch.empty_like(values)
            parts.append(Part(flat, values, group, error, name))
            return SteppedWork(self.average(parts[0]) if values.numel() else iter(()))

        def arrived() -> None:
            """Take over state and ``lost``, unless the average is not finite: a loss scaler then
            skips the step.
            """
            part = parts[0]
            if lost is not None and part.lost is not None:
                error = part.lost
                if error.numel() < lost.numel():
                    # The error of the node's average, which this rank alone keeps, is divided by
                    # the ranks of the node next time. What this rank owed elsewhere has travelled
                    # with the node's sum.
                    error = torch.zeros_like(lost)
                    part.of(error).copy_(part.lost).mul_(comm.world_size // part.group.world_size)
                part.updates.append((lost, error))
            keep_if_finite(flat, part.updates)

        return ChainedWork(comm.average_by(flat, start, name=name), arrived)


class SteppedWork:
    """The `Work` of ``steps``, which yield the collectives that they wait for. It runs in the
    threads that call it.
    """

    __slots__ = ("_current", "_steps")

    def __init__(self, steps: Iterator[Work]) -> None:
        self._steps = steps
        self._current = next(steps, None)

    def advance(self) -> None:
        """Wait for the collective under way, and start the next one."""
        if self._current is not None:
            self._current.wait()
            self._current = next(self._steps, None)

    def wait(self) -> None:
        while self._current is not None:
            self.advance()

    def done(self) -> bool:
        return self._current is None


def messages(count: int, length: int, like: Tensor) -> Tensor:
    """Room for as many messages of bytes, on the device of ``like``: rows that begin at multiples
    of 128 bytes, so that a GPU reads 16 bytes at a time.
    """
    padded = -(-length // _ROW_BYTES) * _ROW_BYTES
    return torch.zeros(count, padded, dtype=torch.uint8, device=like.device)
