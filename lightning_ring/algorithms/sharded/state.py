"""Optimizer state: sharded over the ranks, and gathered for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_ring.algorithms.sharded.parameters import ParameterShard, ShardedParameters
from lightning_ring.errors import ConfigurationError

State = dict[Any, dict[str, Any]]  # by parameter, and by any other key of an optimizer
# torch's names of state with one number per parameter
_SCALARS = ("step", "mu_product", "eta", "mu")


def renamed(state: State, names: Mapping[Any, Any]) -> State:
    """``state`` with the keys that ``names`` gives; others stay."""
    return {names.get(key, key): value for key, value in state.items()}


class ShardedState(MutableMapping[Any, Any]):
    """Replaces an optimizer's sharded state outside of its step, where any use of the state is
    an error.
    """

    def __init__(self, optimizer: Optimizer, message: str | None = None) -> None:
        self.message = message or (
            f"{type(optimizer).__name__}.state was used outside of step() under "
            "strategy='ring_sharded', where each rank holds its part of the state. For the full "
            "state save a checkpoint (trainer.save_checkpoint), or call "
            "trainer.strategy.optimizer_state(optimizer) on all ranks: rank 0 gets it (in a loop "
            "of your own: training.optimizer_state_dict(optimizer), fabric.save). Optimizers that "
            "need their state between steps, such as schedule-free ones in eval(), work with "
            "strategy='ring'."
        )

    def _refuse(self, *_: Any) -> NoReturn:
        raise ConfigurationError(self.message)

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = _refuse
    __reduce_ex__ = _refuse  # a copy, or a pickled one


def shard_state(
    full: Mapping[Any, dict[str, Any]], shards: Mapping[Parameter, ParameterShard]
) -> State:
    """This rank's parts of the full state ``full``, by shard. Values with one number per
    parameter are kept.
    """
    scalars = set(_SCALARS) | {  # and those that are 0-d for a parameter that is not
        key
        for param, state in full.items()
        if isinstance(param, Tensor) and param.dim()
        for key, value in state.items()
        if isinstance(value, Tensor) and not value.dim()
    }
    parts: State = {}
    for param, state in full.items():
        if not isinstance(param, Tensor):
            parts[param] = state
            continue
        shard = shards[param]  # type: ignore[index]
        parts[shard.weight] = {
            key: _cut(key, value, shard)
            if isinstance(value, Tensor) and key not in scalars
            else value
            for key, value in state.items()
        }
    return parts


def _cut(key: str, value: Tensor, shard: ParameterShard) -> Tensor:
    if value.shape != shard.param.shape:
        raise ConfigurationError(
            f"optimizer state {key!r} has the shape {tuple(value.shape)} for a parameter of shape "
            f"{tuple(shard.param.shape)}: it has not one number per element, and cannot be sharded "
            "over ranks. Use strategy='ring'."
        )
    memory = torch.empty_strided(
        shard.param.size(), shard.strides, dtype=value.dtype, device=value.device
    )
    flat = memory.copy_(value).as_strided((value.numel(),), (1,))
    return flat[shard.first : shard.first + shard.numel].clone()


def gather_state(
    parts: Mapping[Any, dict[str, Any]], parameters: ShardedParameters, *, keep: bool
) -> State:
    """Gather the full state, one bucket and one key at a time. Collective.

    Args:
        parts: This rank's state, by shard.
        keep: Return the result, by parameter and on the CPU. Other ranks hold at most one bucket at
            a time.
    """
    scalars = _agreed_scalars(parts, parameters)
    weights = {shard.weight for shard in parameters.by_param.values()}
    full: State = {key: state for key, state in parts.items() if keep and key not in weights}
    for bucket in parameters.buckets:
        held = [(shard, parts[shard.weight]) for shard in bucket.shards if shard.weight in parts]
        for shard, state in held if keep else ():
            full[shard.param] = {
                key: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
                for key, value in state.items()
                if key in scalars or not isinstance(value, Tensor)
            }
        kinds = {
            (key, value.dtype)
            for _, state in held
            for key, value in state.items()
            if isinstance(value, Tensor) and key not in scalars
        }
        for key, dtype in sorted(kinds, key=str):
            chosen = [shard for shard, state in held if _is_of(state.get(key), dtype)]
            flat = torch.zeros(bucket.numel, dtype=dtype, device=bucket.device)
            for shard in chosen:
                shard.part(flat).copy_(parts[shard.weight][key])
            parameters.comm.all_gather_(flat, name=f"{key} of {bucket.name}").wait()
            for shard in chosen if keep else ():
                whole = shard.full(flat)
                on_host = whole.to("cpu", copy=True, memory_format=torch.preserve_format)
                full[shard.param][key] = on_host
    return full


def _agreed_scalars(parts: Mapping[Any, dict[str, Any]], parameters: ShardedParameters) -> set[str]:
    """Keys whose value on some rank has not one number per element of its shard."""
    mine = {
        key
        for shard in parameters.by_param.values()
        for key, value in parts.get(shard.weight, {}).items()
        if isinstance(value, Tensor) and value.shape != (shard.numel,)
    }
    return set().union(
        *parameters.comm.all_gather_object(mine, name="optimizer state for save_checkpoint")
    )


def _is_of(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, Tensor) and value.dtype == dtype
