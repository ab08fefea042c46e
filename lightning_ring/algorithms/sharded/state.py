"""Optimizer state between its two forms: whole tensors for a checkpoint, parts of them on the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_ring.algorithms.sharded.parameters import ParameterBucket, Piece, ShardedParameters
from lightning_ring.errors import ConfigurationError

State = dict[Any, dict[str, Any]]  # by parameter; also by whatever else an optimizer uses as a key
_SCALARS = ("step", "mu_product", "eta", "mu")  # torch's names of what is one number for a parameter, of any shape


class StateOfParts(MutableMapping[Any, Any]):
    """In the place of an optimizer's state while that is of this rank's parts: using it in any way is an error."""

    def __init__(self, optimizer: Optimizer, message: str | None = None) -> None:
        self.message = message or (
            f"{type(optimizer).__name__}.state was used outside of step() under strategy='ring_sharded', where each "
            "rank holds its part of the state. A checkpoint (trainer.save_checkpoint) holds the whole of it, and so "
            "does what trainer.strategy.optimizer_state(optimizer), called on all ranks, gives rank 0. Methods of an "
            "optimizer that need its state between steps, such as eval() of a schedule-free one, work with "
            "strategy='ring'."
        )

    def _refuse(self) -> NoReturn:
        raise ConfigurationError(self.message)

    def __getitem__(self, key: Any) -> Any:
        self._refuse()

    def __setitem__(self, key: Any, value: Any) -> None:
        self._refuse()

    def __delitem__(self, key: Any) -> None:
        self._refuse()

    def __iter__(self) -> Iterator[Any]:
        self._refuse()

    def __len__(self) -> int:
        self._refuse()

    def __reduce_ex__(self, protocol: Any) -> Any:  # a copy, or a pickled one
        self._refuse()


def cut_state(whole: Mapping[Any, dict[str, Any]], pieces: Mapping[Parameter, Piece]) -> State:
    """This rank's parts of ``whole``, by piece; values that are not one number an element are kept as they are.

    Raises:
        ConfigurationError: State that is neither one number a parameter nor one number an element of it.
    """
    scalars = _one_a_parameter(whole)
    parts: State = {}
    for param, state in whole.items():
        if not isinstance(param, Tensor):
            parts[param] = state
            continue
        piece = pieces[param]  # type: ignore[index]
        parts[piece.weight] = {
            key: _cut(key, value, piece) if isinstance(value, Tensor) and key not in scalars else value
            for key, value in state.items()
        }
    return parts


def _one_a_parameter(whole: Mapping[Any, dict[str, Any]]) -> set[str]:
    """Keys whose tensors have no dimensions although the parameter has; of a parameter without any none could tell."""
    scalars = set(_SCALARS)
    for param, state in whole.items():
        if isinstance(param, Tensor) and param.dim():
            scalars |= {key for key, value in state.items() if isinstance(value, Tensor) and not value.dim()}
    return scalars


def _cut(key: str, value: Tensor, piece: Piece) -> Tensor:
    if value.shape != piece.param.shape:
        raise ConfigurationError(
            f"optimizer state {key!r} has the shape {tuple(value.shape)} for a parameter of shape "
            f"{tuple(piece.param.shape)}: it is not one number an element, and cannot be cut over ranks. Use "
            "strategy='ring'."
        )
    memory = torch.empty_strided(piece.param.size(), piece.strides, dtype=value.dtype, device=value.device)
    flat = memory.copy_(value).as_strided((value.numel(),), (1,))
    return flat[piece.first : piece.first + piece.numel].clone()


def gather_state(parts: Mapping[Any, dict[str, Any]], parameters: ShardedParameters, *, keep: bool) -> State:
    """Put all ranks' parts together, one bucket and one kind of value at a time; collective.

    Args:
        parts: This rank's state, by piece.
        keep: Return the result, by whole parameter and on the CPU; elsewhere at most one bucket is held at a time.
    """
    scalars = _agreed_scalars(parts, parameters)
    weights = {piece.weight for bucket in parameters.buckets for piece in bucket.pieces}
    whole: State = {key: state for key, state in parts.items() if keep and key not in weights}
    for bucket in parameters.buckets:
        held = [(piece, parts[piece.weight]) for piece in bucket.pieces if piece.weight in parts]
        for piece, state in held if keep else ():
            kept = {k: v for k, v in state.items() if k in scalars or not isinstance(v, Tensor)}
            whole[piece.param] = {key: _copy(value) for key, value in kept.items()}
        for key in sorted({key for _, state in held for key in state} - scalars):
            values = [(piece, state[key]) for piece, state in held if isinstance(state.get(key), Tensor)]
            for dtype in sorted({value.dtype for _, value in values}, key=str):
                chosen = [(piece, value) for piece, value in values if value.dtype == dtype]
                for param, value in _gather(bucket, chosen, dtype, parameters, key, keep):
                    whole[param][key] = value
    return whole


def _agreed_scalars(parts: Mapping[Any, dict[str, Any]], parameters: ShardedParameters) -> set[str]:
    """Keys that some rank holds something else under than one number an element of its piece."""
    mine = set()
    for bucket in parameters.buckets:
        for piece in bucket.pieces:
            for key, value in parts.get(piece.weight, {}).items():
                if isinstance(value, Tensor) and tuple(value.shape) != (piece.numel,):
                    mine.add(key)
    return set().union(*parameters.comm.all_gather_object(mine))


def _gather(
    bucket: ParameterBucket,
    values: list[tuple[Piece, Tensor]],
    dtype: torch.dtype,
    parameters: ShardedParameters,
    key: str,
    keep: bool,
) -> Iterable[tuple[Parameter, Tensor]]:
    flat = torch.zeros(bucket.numel, dtype=dtype, device=bucket.device)
    for piece, value in values:
        piece.part(flat).copy_(value)
    parameters.comm.all_gather_(flat, name=f"{key} of {bucket.name}").wait()
    if not keep:
        return ()
    return [(p.param, p.whole(flat).to("cpu", copy=True, memory_format=torch.preserve_format)) for p, _ in values]


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
