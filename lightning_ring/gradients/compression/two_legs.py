"""An average in two legs, as messages of bytes: each rank sums its shard, and sends the rounded
average back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from lightning_ring.comm.communicator import Communicator, Work, shard
from lightning_ring.gradients.compression.between_nodes import Part


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
