"""Mirrors: each rank steps the shard of another rank too, so that a death loses no optimizer
state.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_ring.algorithms.sharded.parameters import (
    ParameterBucket,
    ParameterShard,
    ShardedParameters,
)
from lightning_ring.algorithms.sharded.state import State, shard_state
from lightning_ring.comm.communicator import Work


class Mirrors:
    """This rank's copy of the shard of the rank before it in ``order``, a list of all ranks.

    Before each step its weights and averaged gradients are those of that rank. The same optimizer
    steps both shards, so that they keep the same state.

    Attributes:
        by_param: The mirrored part of each parameter that is in a bucket.
    """

    def __init__(self, parameters: ShardedParameters, order: Sequence[int]) -> None:
        self.by_param: dict[Parameter, ParameterShard] = {}
        self._parameters = parameters
        self._comm = parameters.comm
        self._order = list(order)
        self.place = self._order.index(self._comm.rank)
        self._num_buckets = 0

    @torch.no_grad()
    def receive(self) -> None:
        """Exchange averaged gradients, once they are final, before the commit barrier.
        Collective.
        """
        self._parameters.follow()
        if self._comm.world_size == 1:
            return
        self.follow()
        exchanges = [self._exchange(bucket) for bucket in self._parameters.buckets]
        for bucket, (work, received) in zip(self._parameters.buckets, exchanges, strict=True):
            work.wait()
            parts = iter(
                received.split(
                    [self.by_param[shard.param].numel for shard in _with_gradient(bucket)]
                )
            )
            for shard in bucket.shards:
                mirrored = self.by_param[shard.param]
                # other code may have changed parameters
                mirrored.weight.copy_(mirrored.part(bucket.flat))
                mirrored.weight.grad = next(parts) if shard.param.grad is not None else None

    def cut(self, full: Mapping[Any, dict[str, Any]]) -> State:
        """The mirrored parts of a full optimizer state, which share no tensor with it."""
        tensors = {param: state for param, state in full.items() if param in self.by_param}
        return {
            weight: copy.deepcopy(state)
            for weight, state in shard_state(tensors, self.by_param).items()
        }

    def follow(self) -> None:
        """Mirror the parts in new buckets."""
        shards, before = self._parameters.reducer.shards, self._order[self.place - 1]
        index = self._comm.shard_indices[before]
        for bucket in self._parameters.buckets[self._num_buckets :]:
            for shard in bucket.shards:
                _, start, stop = shards.bounds(shard.param, index)
                weight = Parameter(bucket.flat[start:stop].clone())
                self.by_param[shard.param] = ParameterShard(
                    shard.param,
                    shard.offset,
                    shard.strides,
                    start - shard.offset,
                    stop - start,
                    weight,
                )
        self._num_buckets = len(self._parameters.buckets)

    def _exchange(self, bucket: ParameterBucket) -> tuple[Work, Tensor]:
        held = _with_gradient(bucket)
        own = [self._parameters.own_gradient(shard.param) for shard in held]
        nothing = bucket.flat.new_empty(0)
        inputs, outputs = [nothing] * self._comm.world_size, [nothing] * self._comm.world_size
        received = bucket.flat.new_empty(sum(self.by_param[shard.param].numel for shard in held))
        inputs[self._order[(self.place + 1) % len(self._order)]] = torch.cat(
            [part for part in own if part is not None] or [nothing]
        )
        outputs[self._order[self.place - 1]] = received
        return self._comm.all_to_all(inputs, outputs, name=f"mirror of {bucket.name}"), received


def _with_gradient(bucket: ParameterBucket) -> list[ParameterShard]:
    return [shard for shard in bucket.shards if shard.param.grad is not None]
