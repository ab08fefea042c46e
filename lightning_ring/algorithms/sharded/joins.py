"""What ranks keep of the time before a join, until a step has been taken behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from lightning_ring.algorithms.sharded.inventory import Inventory, PartState, Span
from lightning_ring.algorithms.sharded.mirrors import Mirrors
from lightning_ring.algorithms.sharded.parameters import ParameterShard, ShardedParameters
from lightning_ring.algorithms.sharded.rebuilding import Standing
from lightning_ring.algorithms.sharded.state import State


@dataclass(frozen=True, slots=True, eq=False)
class Before:
    """The shards of a rank, as they were cut before. A death in the join, or up to the next step,
    goes back to them.

    Attributes:
        order: Names of the parameters in the order of the buckets.
        states: Of each optimizer, by part.
    """

    standing: Standing
    order: list[str]
    parameters: ShardedParameters
    mirrors: Mirrors
    states: list[State]

    def inventory(self, numbers: Mapping[Parameter, int]) -> Inventory:
        held = Inventory()
        for shard in (*self.mirrors.by_param.values(), *self.parameters.by_param.values()):
            held.add(span_of(shard, numbers), [state.get(shard.weight) for state in self.states])
        return held

    def own(self, numbers: Mapping[Parameter, int]) -> list[Span]:
        """The parts that this rank has stepped. A parameter without elements is that of one
        rank, too.
        """
        spans = [span_of(shard, numbers) for shard in self.parameters.by_param.values()]
        empty = {numbers[param] for param in self.parameters.by_param if not param.numel()}
        return [
            span
            for span in spans
            if span.numel or (span.index in empty and self.standing.place == 0)
        ]

    def others(self) -> list[State]:
        """The state that belongs to no part."""
        shards = (*self.mirrors.by_param.values(), *self.parameters.by_param.values())
        weights = {shard.weight for shard in shards}
        return [
            {key: value for key, value in state.items() if key not in weights}
            for state in self.states
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Newcomer:
    """All that a newcomer has got."""

    inventory: Inventory
    others: list[State]

    @property
    def standing(self) -> Standing:
        return Standing(-1)

    def states(self, module: nn.Module) -> list[State]:
        """Whole states, by parameter."""
        whole = [dict(other) for other in self.others]
        for index, param in enumerate(module.parameters()):
            found = self.inventory.cut(Span(index, 0, param.numel()))
            for state, values in zip(whole, found, strict=False):
                if values is not None:
                    state[param] = {key: _in_form(value, param) for key, value in values.items()}
        return whole


def span_of(shard: ParameterShard, numbers: Mapping[Parameter, int]) -> Span:
    return Span(numbers[shard.param], shard.first, shard.numel)


def by_shard(
    shards: Sequence[ParameterShard], numbers: Mapping[Parameter, int], held: Inventory
) -> list[State]:
    """The state of each optimizer, by part, of which none is missing in ``held``."""
    found: list[tuple[Parameter, PartState]] = [
        (s.weight, held.cut(span_of(s, numbers))) for s in shards
    ]
    count = max((len(state) for _, state in found), default=0)
    states: list[State] = [{} for _ in range(count)]
    for weight, parts in found:
        for state, values in zip(states, parts, strict=False):
            if values is not None:
                state[weight] = values
    return states


def _in_form(value: Any, param: Parameter) -> Any:
    if not (isinstance(value, torch.Tensor) and value.dim() == 1):
        return value
    return value.as_strided(param.size(), torch.empty_like(param, device="meta").stride())
