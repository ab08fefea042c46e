"""Compressors that send a flat tensor of gradients as one message of their own, between nodes
where there are any.
"""

from __future__ import annotations

import functools
import importlib
import logging
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from lightning_ring.comm.communicator import ChainedWork, Communicator, ReduceOp, Work, shard
from lightning_ring.errors import ConfigurationError
from lightning_ring.gradients.compression.compressor import Compressor, counterpart
from lightning_ring.gradients.compression.error_feedback import keep_if_finite

log = logging.getLogger(__name__)

MIN_NUMEL = 4096  # 16 KiB of float32: the most that an all-reduce sends as one message to everybody


@dataclass(slots=True)
class Part:
    """What a rank averages with other ranks: ``flat``, or on nested rings its part of the node's
    average.

    Attributes:
        whole: The tensor that `Compressor.all_reduce` was called with.
        values: The part of it, a view. An average takes its place.
        group: The ranks to average over.
        num_ranks: Ranks of the whole job: those of ``group``, each with the ranks of its node.
        lost: Filled with the part of ``values`` that does not travel; `None` if nobody asks.
        updates: State, and what it becomes if the average is finite.
    """

    whole: Tensor
    values: Tensor
    group: Communicator
    num_ranks: int
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
        before, size = (
            int(self.values.storage_offset() - self.whole.storage_offset()),
            self.values.numel(),
        )
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
        if type(min_numel) is not int or min_numel < 0:
            raise ConfigurationError(
                f"{type(self).__name__} got min_numel={min_numel!r}, expected 0 or more gradients."
            )
        self.min_numel = min_numel
        self._told = False

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
            self._tell(flat, comm)
            if lost is not None:
                lost.zero_()
            return comm.all_reduce_(flat, op=ReduceOp.AVG, name=name)
        parts: list[Part] = []

        def start(values: Tensor, group: Communicator) -> Work:
            error = None if lost is None else torch.empty_like(values)
            parts.append(Part(flat, values, group, comm.world_size, error, name))
            return SteppedWork(self.average(parts[0]) if values.numel() else iter(()))

        work = comm.average_by(flat, start, name=name)
        return ChainedWork(work, lambda: _keep(flat, lost, parts[0]))

    def _tell(self, flat: Tensor, comm: Communicator) -> None:
        if not self._told and comm.rank == 0 and comm.world_size > 1:
            log.info(
                "lightning_ring: a bucket of %d gradients travels as it is: compression %r "
                "begins with %d.",
                flat.numel(),
                self.name,
                self.min_numel,
            )
        self._told = True


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


def _keep(flat: Tensor, lost: Tensor | None, part: Part) -> None:
    """Take over state and ``lost``, unless the average is not finite: a loss scaler then skips
    the step.
    """
    updates = list(part.updates)
    if lost is not None and part.lost is not None:
        if part.lost.numel() < lost.numel():
            # The error of the node's average, which this rank alone keeps, is divided by the ranks
            # of the node next time. What this rank owed elsewhere has travelled with the node's
            # sum.
            error = torch.zeros_like(lost)
            part.of(error).copy_(part.lost).mul_(part.num_ranks // part.group.world_size)
            updates.append((lost, error))
        else:
            updates.append((lost, part.lost))
    keep_if_finite(flat, updates)


class Code(Protocol):
    """Float32 values as bytes."""

    def num_bytes(self, numel: int) -> int:
        """Length of the message of ``numel`` values: a multiple of 4."""

    def encode(self, values: Tensor, message: Tensor) -> None:
        """Write 1-D ``values`` to 1-D uint8 ``message``, which may be longer."""

    def decode(self, message: Tensor, values: Tensor) -> None:
        """Replace ``values`` by those that were encoded."""


def average_in_two_legs(
    part: Part, code: Code, server: Tensor | None = None, *, shard_only: bool = False
) -> Iterator[Work]:
    """A reduce-scatter by all-to-all, whose sums are float32, and an all-gather, both of encoded
    values.

    Args:
        part: Its ``lost`` becomes this rank's error of the first leg. Without ``server`` the owner
            of a shard adds that of the second leg, times the number of ranks, for the next average
            divides by it.
        code: Of both legs.
        server: The owners' errors of the second leg, in the places of the shards, which are added
            before it and become its new errors. Of the size of ``part.values``; only this rank's
            shard is used.
        shard_only: Leave out the second leg. This rank's shard of ``part.values`` gets the bits
            that all would get.
    """
    values, group = part.values, part.group
    shards = [shard(values, group.world_size, index) for index in range(group.world_size)]
    sent = _messages(shards, code)
    for own, message in zip(shards, sent, strict=True):
        code.encode(own, message)
    received = torch.empty_like(sent)
    targets = [sent[index] for index in group.shard_indices]
    work = group.all_to_all(targets, list(received), name=part.name)
    if part.lost is not None:  # while the messages travel
        for lost, own, message in zip(_shards(part.lost, group), shards, sent, strict=True):
            code.decode(message, lost)
            torch.sub(own, lost, out=lost)
    yield work
    mine = group.shard_index
    mean = _mean(received, shards[mine], code)
    if server is not None:
        mean += _shards(server, group)[mine]
    code.encode(mean, sent[mine])
    if server is not None or part.lost is not None:
        error = torch.empty_like(mean)
        code.decode(sent[mine], error)
        torch.sub(mean, error, out=error)
        if server is not None:
            part.updates.append((_shards(server, group)[mine], error))
        elif part.lost is not None:
            _shards(part.lost, group)[mine].add_(error, alpha=group.world_size)
    if shard_only:
        code.decode(sent[mine], shards[mine])
        return
    yield group.all_gather_(sent.view(-1), name=f"{part.name}, averages")
    for own, message in zip(shards, sent, strict=True):
        code.decode(message, own)


def _messages(shards: list[Tensor], code: Code) -> Tensor:
    longest = max(own.numel() for own in shards)
    return torch.zeros(
        len(shards), code.num_bytes(longest), dtype=torch.uint8, device=shards[0].device
    )


def _mean(received: Tensor, like: Tensor, code: Code) -> Tensor:
    total, other = torch.empty_like(like), torch.empty_like(like)
    for index, message in enumerate(received):
        code.decode(message, other if index else total)
        if index:
            total += other
    return total.div_(len(received))


def _shards(tensor: Tensor, group: Communicator) -> list[Tensor]:
    return [shard(tensor, group.world_size, index) for index in range(group.world_size)]


def triton_kernels(values: Tensor) -> ModuleType | None:
    """The module `kernels`, for values on a GPU; `None` elsewhere, or without Triton."""
    return _imported_kernels() if values.is_cuda else None


@functools.cache
def _imported_kernels() -> ModuleType | None:
    try:
        import triton  # noqa: F401  # torch for GPUs may come without it
    except ImportError:
        return None
    return importlib.import_module("lightning_ring.gradients.compression.kernels")
