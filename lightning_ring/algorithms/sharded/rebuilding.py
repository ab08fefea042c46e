"""The whole of sharded parameters and optimizer state again, from each shard's rank or its
mirror.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ring.algorithms.sharded.mirrors import Mirrors
from lightning_ring.algorithms.sharded.parameters import (
    ParameterBucket,
    ParameterShard,
    ShardedParameters,
)
from lightning_ring.algorithms.sharded.state import State
from lightning_ring.comm.communicator import Communicator, ReduceOp, as_integers
from lightning_ring.errors import StateLostError


@dataclass(frozen=True, slots=True)
class Standing:
    """What a rank holds of the state when ranks have changed.

    ``place``: it holds the shard of that place in the order of mirrors, and the one before; `None`:
    it holds all. ``places`` is the number of places. ``settled``: it has all parameters, and the
    next shards are cut from the same ones.
    """

    place: int | None = None
    places: int = 0
    settled: bool = True


def holders_of(standings: Sequence[Standing]) -> list[tuple[int, bool]]:
    """By place, the rank that holds its shard, and whether that rank is the mirror.

    Raises:
        StateLostError: Neither is there.
    """
    places = max(standing.places for standing in standings)
    rank_at = {standing.place: rank for rank, standing in enumerate(standings)}
    after = {place: (place + 1) % places for place in range(places)}
    lost = [
        place for place in range(places) if place not in rank_at and after[place] not in rank_at
    ]
    if lost:
        raise StateLostError(
            f"{len(lost)} of {places} shards of the optimizer's state are lost: the two ranks that "
            "held the same shard died at once."
        )
    return [
        (rank_at[p], False) if p in rank_at else (rank_at[after[p]], True) for p in range(places)
    ]


class Rebuilding:
    """Collects whole tensors over ``comm``, on all of its ranks, from parts of the ranks before."""

    def __init__(
        self,
        parameters: ShardedParameters,
        mirrors: Mirrors,
        standings: Sequence[Standing],
        comm: Communicator,
    ) -> None:
        self._parameters = parameters
        self._mirrors = mirrors
        self._comm = comm
        self._settled = all(standing.settled for standing in standings)
        self._held = [mirrored for rank, mirrored in holders_of(standings) if rank == comm.rank]

    @torch.no_grad()
    def run(self, held: list[State]) -> list[State]:
        """Give all parameters their values, unless all ranks have them; returns whole states, by
        parameter. Collective.

        ``held`` is this rank's state of each optimizer, by part. All of it is replaced after the
        last collective.
        """
        for bucket in [] if self._settled else self._parameters.buckets:
            parts = [(part, part.weight.detach()) for part in self._parts(bucket)]
            flat = self._gather(bucket, parts, bucket.flat.dtype)
            # a backward may follow, whose forward read the same values: parameters and their flat
            # memory have versions of their own
            bucket.flat.copy_(flat)
            bucket.arrive()
        states = [self._whole(state) for state in held]
        return states

    def _whole(self, held: State) -> State:
        own = {shard.weight for shard in self._parameters.by_param.values()}
        mirrored = {shard.weight for shard in self._mirrors.by_param.values()}
        full: State = {key: state for key, state in held.items() if key not in own | mirrored}
        for bucket in self._parameters.buckets:
            # every rank has state for each parameter that has any, also for an empty part
            kept = {
                shard.param: dict(held[shard.weight])
                for shard in bucket.shards
                if shard.weight in held
            }
            full |= kept
            values = {
                (key, value.dtype)
                for state in kept.values()
                for key, value in state.items()
                if _is_part(value)
            }
            for key, dtype in sorted(values, key=str):
                chosen = {
                    p
                    for p, state in kept.items()
                    if _is_part(state.get(key)) and state[key].dtype == dtype
                }
                parts = [
                    (part, held[part.weight][key])
                    for part in self._parts(bucket)
                    if part.param in chosen
                ]
                flat = self._gather(bucket, parts, dtype)
                for shard in bucket.shards:
                    if shard.param in chosen:
                        kept[shard.param][key] = shard.full(flat).clone(
                            memory_format=torch.preserve_format
                        )
        return full

    def _parts(self, bucket: ParameterBucket) -> list[ParameterShard]:
        """Those that this rank contributes."""
        sources = [
            self._mirrors.by_param if mirrored else self._parameters.by_param
            for mirrored in self._held
        ]
        return [source[shard.param] for source in sources for shard in bucket.shards]

    def _gather(
        self,
        bucket: ParameterBucket,
        parts: list[tuple[ParameterShard, Tensor]],
        dtype: torch.dtype,
    ) -> Tensor:
        flat = torch.zeros(bucket.numel, dtype=dtype, device=bucket.device)
        for part, value in parts:
            part.part(flat).copy_(value)
        # sums of integers of which all but one are zero: the same bits, also of -0.0 and NaN
        summed = as_integers(flat)
        self._comm.all_reduce_(summed, op=ReduceOp.SUM, name="shards of ranks before").wait()
        return flat


def _is_part(value: Any) -> bool:
    """Whether a value of optimizer state has one number for each element of its part."""
    return isinstance(value, Tensor) and value.dim() == 1
