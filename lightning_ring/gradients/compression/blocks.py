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

from lightning_ring.comm.communicator import Work
from lightning_ring.gradients.compression.between_nodes import Part, messages

BLOCK = 256  # values that share a scale
CHUNK = 1 << 16  # values of a piece: 256 KiB, beside which its copy fits into 1 MiB of cache
SHARD_VALUES = 32  # a shard has a multiple of them: 128 bytes of float32


@dataclass(frozen=True, slots=True)
class BlockCode:
    """Messages of the numbers of whole blocks, then a float32 scale for each block.

    Attributes:
        width: Bytes of a block's numbers.
        encode_blocks: Writes 1-D float32 values, of which the last block may be shorter, to numbers
            (int8, with room for whole blocks) and scales.
        decode_blocks: Takes values to replace, numbers, and scales.
        kernels: The code's name in the module `kernels`.
    """

    width: int
    encode_blocks: Callable[[Tensor, Tensor, Tensor], None]
    decode_blocks: Callable[[Tensor, Tensor, Tensor], None]
    kernels: str

    def num_bytes(self, numel: int) -> int:
        """Length of the message of ``numel`` values: a multiple of 4."""
        return -(-numel // BLOCK) * (self.width + 4)

    def encode(self, values: Tensor, messages: Tensor) -> None:
        """Write each shard of 1-D ``values`` to a row of 2-D uint8 ``messages``, which may be
        longer.
        """
        numbers, scales = self._cut(messages)
        length = shard_length(values.numel(), len(messages))
        if kernels := triton_kernels(values):
            kernels.encode(self.kernels, values, numbers, scales, length)
            return
        for shard in zip(values.split(length), numbers, scales, strict=False):
            self.encode_blocks(*shard)

    def decode(self, messages: Tensor, values: Tensor) -> None:
        """Replace each shard of ``values`` by the one that was encoded in its row."""
        numbers, scales = self._cut(messages)
        length = shard_length(values.numel(), len(messages))
        if kernels := triton_kernels(values):
            kernels.decode(self.kernels, values, numbers, scales, length)
            return
        for shard in zip(values.split(length), numbers, scales, strict=False):
            self.decode_blocks(*shard)

    def average(self, messages: Tensor, values: Tensor) -> None:
        """Replace ``values`` by the average of all rows, each of which holds as many values."""
        if kernels := triton_kernels(values):
            length = shard_length(values.numel(), 1)
            kernels.decode(self.kernels, values, *self._cut(messages), length, len(messages))
            return
        self.decode(messages[:1], values)
        other = torch.empty_like(values)
        for index in range(1, len(messages)):
            self.decode(messages[index : index + 1], other)
            values += other
        values.div_(len(messages))

    def _cut(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        end = messages.shape[1] // (self.width + 4) * self.width
        return messages[:, :end].view(torch.int8), messages[:, end:].view(torch.float32)


def shard_length(numel: int, num_shards: int) -> int:
    """Values of each shard but the last ones, which are shorter or empty.

    Sharded buckets have a multiple of ``num_shards * SHARD_VALUES`` elements: there these are the
    shards of `shard_bounds`.
    """
    return max(-(-numel // (num_shards * SHARD_VALUES)), 1) * SHARD_VALUES


def aligned_shard(values: Tensor, num_shards: int, index: int) -> Tensor:
    """View of the shard ``index`` of 1-D ``values``, which begins at a multiple of 128 bytes of
    float32.
    """
    length = shard_length(values.numel(), num_shards)
    return values[index * length : (index + 1) * length]


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
        return importlib.import_module("lightning_ring.gradients.compression.kernels")
    except ImportError:  # torch for GPUs may come without Triton
        return None


def average_in_two_legs(
    part: Part, code: BlockCode, server: Tensor | None = None, *, shard_only: bool = False
) -> Iterator[Work]:
    """A reduce-scatter by all-to-all, whose sums are float32, and an all-gather, both of encoded
    values.

    Two ranks without ``server`` need one leg, in which they exchange all of their values: as many
    bytes, half as many messages, and one rounding instead of two.

    Args:
        part: Its ``lost`` becomes this rank's error of the first leg. Without ``server`` the owner
            of a shard adds that of the second leg, times the number of ranks, for the next average
            divides by it.
        code: Of both legs.
        server: The owners' errors of the second leg, in the places of the shards, which are added
            before it and become its new errors. Of the size of ``part.values``; only this rank's
            shard is used.
        shard_only: Leave out the second leg. This rank's `aligned_shard` of ``part.values`` gets
            the bits that all would get.
    """
    group, values, lost = part.group, part.values, part.lost
    size, mine = group.world_size, group.shard_index
    own = aligned_shard(values, size, mine)
    length = code.num_bytes(shard_length(values.numel(), size))
    one_leg = size == 2 and server is None
    to_both = one_leg and not shard_only
    rows = messages(4 if to_both else size, length, values)
    sent = rows[2 * mine : 2 * mine + 2] if to_both else rows
    code.encode(values, sent)
    if to_both:
        work = group.all_gather_(rows.view(-1), name=part.name)
    else:
        received = torch.empty_like(sent)
        targets = [sent[index] for index in group.shard_indices]
        work = group.all_to_all(targets, list(received), name=part.name)
    if lost is not None:  # while the messages travel
        _subtract_decoded(code, values, sent, lost)
    yield work
    if to_both:
        for index in range(2):
            code.average(rows[index::2], aligned_shard(values, 2, index))
        return
    if one_leg:
        code.average(received, own)
        return
    mean = torch.empty_like(own)
    code.average(received, mean)
    if server is not None:
        mean += aligned_shard(server, size, mine)
    own_message = sent[mine : mine + 1]
    code.encode(mean, own_message)
    if server is not None or lost is not None:
        error = _subtract_decoded(code, mean, own_message, torch.empty_like(mean))
    if server is not None:
        part.updates.append((aligned_shard(server, size, mine), error))
    elif lost is not None:
        aligned_shard(lost, size, mine).add_(error, alpha=size)
    if shard_only:
        code.decode(own_message, own)
        return
    yield group.all_gather_(sent.view(-1), name=f"{part.name}, averages")
    code.decode(sent, values)


def _subtract_decoded(code: BlockCode, values: Tensor, sent: Tensor, out: Tensor) -> Tensor:
    """What the messages ``sent`` lack of ``values``."""
    code.decode(sent, out)
    return torch.sub(values, out, out=out)
