"""Blocks of 256 values with a scale each, and their average in two legs: each rank sums its shard,
and sends the rounded average back.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from lightning_ring.comm.communicator import Communicator, Work, shard
from lightning_ring.gradients.compression.between_nodes import Part, messages

BLOCK = 256  # values that share a scale
CHUNK = 1 << 16  # values of a piece: 256 KiB, beside which its copy fits into 1 MiB of cache


@dataclass(frozen=True, slots=True)
class BlockCode:
    """Messages of the numbers of whole blocks, then a float32 scale for each block.

    Attributes:
        width: Bytes of a block's numbers.
        encode_blocks: Writes 1-D float32 values, of which the last block may be shorter, to numbers
            (int8, with room for whole blocks) and scales.
        decode_blocks: Takes numbers, scales, and values to replace.
    """

    width: int
    encode_blocks: Callable[[Tensor, Tensor, Tensor], None]
    decode_blocks: Callable[[Tensor, Tensor, Tensor], None]

    def num_bytes(self, numel: int) -> int:
        """Length of the message of ``numel`` values: a multiple of 4."""
        return -(-numel // BLOCK) * (self.width + 4)

    def encode(self, values: Tensor, message: Tensor) -> None:
        """Write 1-D ``values`` to 1-D uint8 ``message``, which may be longer."""
        self.encode_blocks(values, *self._cut(message))

    def decode(self, message: Tensor, values: Tensor) -> None:
        """Replace ``values`` by those that were encoded."""
        self.decode_blocks(*self._cut(message), values)

    def _cut(self, message: Tensor) -> tuple[Tensor, Tensor]:
        end = message.numel() // (self.width + 4) * self.width
        return message[:end].view(torch.int8), message[end:].view(torch.float32)


def rows_of(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The blocks of 1-D ``values`` as rows, with the number of the first: on CPUs as many as stay
    in a cache, and a shorter one last, by itself.
    """
    whole = values.numel() // BLOCK * BLOCK
    size = CHUNK if values.device.type == "cpu" else max(whole, BLOCK)
    for start in range(0, whole, size):
        yield start // BLOCK, values[start : min(start + size, whole)].view(-1, BLOCK)
    if whole < values.numel():
        yield whole // BLOCK, values[whole:].view(1, -1)


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


def average_in_two_legs(
    part: Part, code: BlockCode, server: Tensor | None = None, *, shard_only: bool = False
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
    group, mine = part.group, part.group.shard_index
    shards = _shards(part.values, group)
    lost = None if part.lost is None else _shards(part.lost, group)
    owed = None if server is None else _shards(server, group)[mine]
    longest = max(own.numel() for own in shards)
    sent = messages(len(shards), code.num_bytes(longest), part.values)
    for own, message in zip(shards, sent, strict=True):
        code.encode(own, message)
    received = torch.empty_like(sent)
    targets = [sent[index] for index in group.shard_indices]
    work = group.all_to_all(targets, list(received), name=part.name)
    if lost is not None:  # while the messages travel
        for own, message, error in zip(shards, sent, lost, strict=True):
            _subtract_decoded(code, own, message, error)
    yield work
    mean = _mean(received, shards[mine], code)
    if owed is not None:
        mean += owed
    code.encode(mean, sent[mine])
    if owed is not None:
        error = _subtract_decoded(code, mean, sent[mine], torch.empty_like(mean))
        part.updates.append((owed, error))
    elif lost is not None:
        error = _subtract_decoded(code, mean, sent[mine], torch.empty_like(mean))
        lost[mine].add_(error, alpha=group.world_size)
    if shard_only:
        code.decode(sent[mine], shards[mine])
        return
    yield group.all_gather_(sent.view(-1), name=f"{part.name}, averages")
    for own, message in zip(shards, sent, strict=True):
        code.decode(message, own)


def _subtract_decoded(code: BlockCode, values: Tensor, message: Tensor, out: Tensor) -> Tensor:
    """What ``message`` lacks of ``values``."""
    code.decode(message, out)
    return torch.sub(values, out, out=out)


def _mean(received: Tensor, like: Tensor, code: BlockCode) -> Tensor:
    total, other = torch.empty_like(like), torch.empty_like(like)
    code.decode(received[0], total)
    for message in received[1:]:
        code.decode(message, other)
        total += other
    return total.div_(len(received))


def _shards(tensor: Tensor, group: Communicator) -> list[Tensor]:
    return [shard(tensor, group.world_size, index) for index in range(group.world_size)]
