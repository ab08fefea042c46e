"""The parameters of an optimizer in one fixed order, the parameters of one step, and their state
as it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ring.optim.engine.sent_tables import SentTables

LOW_PRECISION = (torch.bfloat16, torch.float16)


def compute_dtype(param: Tensor) -> torch.dtype:
    """The dtype that ``param`` is updated in, and its state is kept in: at least float32."""
    return torch.float32 if param.dtype in LOW_PRECISION else param.dtype


def norm_dtype(device: torch.device) -> torch.dtype:
    """The dtype that squares are summed in on ``device``: float64 where it has one."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True, slots=True)
class TensorKind:
    """The properties that the parameters of one `ParameterBatch` share."""

    device: torch.device
    compute: torch.dtype
    weight: torch.dtype
    grad: torch.dtype
    mirror: torch.dtype | None
    flat: bool  # weight, gradient and state lie in memory in the same order without gaps


@dataclass(slots=True)
class ParameterBatch:
    """The parameters of one step that one launch can update.

    ``weights`` are updated: the parameters, or their master copies in float32, which are then
    rounded into ``mirrors`` (the parameters). ``positions`` are the parameters' places in the
    `ParameterList`.
    """

    kind: TensorKind
    positions: list[int] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: list[tuple[Tensor, ...]] = field(default_factory=list)
    mirrors: list[Tensor] = field(default_factory=list)

    def columns(self) -> list[list[Tensor]]:
        """Weights, gradients, each of the states, and mirrors if there are any."""
        states = [list(column) for column in zip(*self.states, strict=True)]
        return [self.weights, self.grads, *states, *([self.mirrors] if self.mirrors else [])]


class ParameterList:
    """The parameters of all groups, in order.

    The step's sums and ``ratios`` (the last trust ratio of each parameter, NaN before its first
    step) live on the first parameter's ``device``. ``steps`` (float32) are the steps taken by each
    parameter, None where the optimizer counts none; ``step_views`` are their 0-d views, the values
    of ``state[param]["step"]``.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        counts_steps: bool,
        steps_on_device: bool,
        tables: SentTables,
    ) -> None:
        self.tables = tables
        self.params: list[Tensor] = [p for group in groups for p in group["params"]]
        self.sizes = [len(group["params"]) for group in groups]
        self.device = self.params[0].device
        count = len(self.params)
        self.ratios = torch.full(
            (count,), torch.nan, dtype=norm_dtype(self.device), device=self.device
        )
        self.steps: Tensor | None = None
        self.step_views: list[Tensor] = []
        if counts_steps:
            self.steps = torch.zeros(count, device=self.device if steps_on_device else "cpu")
            self.step_views = list(self.steps.unbind())

    def groups_on(self, device: torch.device) -> Tensor:
        """The group of each parameter, on ``device``."""
        sizes = self.sizes

        def make() -> Tensor:
            return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))

        return self.tables.get(("groups", device), sizes, device, make)

    def hyper_table(self, groups: list[list[Any]], device: torch.device) -> Tensor:
        """Hyper-parameters of each group as a float64 tensor on ``device``, shape [groups,
        hyper-parameters]; sent only when they change. The host reads no tensor that is there.
        """

        def is_there(value: Any) -> bool:
            return isinstance(value, Tensor) and value.device.type == device.type

        rows = [[0.0 if is_there(value) else float(value) for value in row] for row in groups]
        key = "hyper-parameters", device
        table = self.tables.get(key, rows, device, lambda: torch.tensor(rows, dtype=torch.float64))
        there = {i for row in groups for i, value in enumerate(row) if is_there(value)}
        if not there:
            return table
        columns = list(table.unbind(1))
        for i in there:
            values = [
                row[i].to(device, torch.float64).reshape(()) if is_there(row[i]) else sent
                for row, sent in zip(groups, columns[i].unbind(), strict=True)
            ]
            columns[i] = torch.stack(values)
        return torch.stack(columns, dim=1)

    def fits(self, groups: list[dict[str, Any]]) -> bool:
        """Whether the groups still hold the parameters that this list was made of."""
        if self.sizes != [len(group["params"]) for group in groups]:
            return False
        now = chain.from_iterable(map(itemgetter("params"), groups))
        return all(map(is_, self.params, now))


def parameter_names(groups: list[dict[str, Any]]) -> Iterator[str]:
    """The name of each parameter for messages: its own if the optimizer got named ones, else
    place and shape.
    """
    for g, group in enumerate(groups):
        for i, param in enumerate(group["params"]):
            names = group.get("param_names")
            yield names[i] if names else f"parameter {i} of group {g} (shape {tuple(param.shape)})"


def lie_alike(tensors: tuple[Tensor, ...]) -> bool:
    """Whether all have their elements in memory in the same order, without gaps."""
    for tensor in tensors:  # not all(...): once a step for every parameter
        if not tensor.is_contiguous():
            break
    else:
        return True
    first = tensors[0]
    if any(t.stride() != first.stride() for t in tensors):
        return False
    expected = 1
    for stride, size in sorted(zip(first.stride(), first.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def flat(tensor: Tensor) -> Tensor:
    """1-D view of a tensor that `lie_alike` found without gaps, in memory order."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def load_precisely(optimizer: Optimizer, state_dict: dict[str, Any], load: Any) -> None:
    """Run ``load(state_dict)`` (`Optimizer.load_state_dict`), then put the values back that it
    rounded.

    torch casts floating-point state to the parameter's dtype, which would round the float32 state
    of a bfloat16 parameter. Hooks of the optimizer may change ``state_dict`` before; hooks that run
    after loading see the final state. Tensors are copied, so that the optimizer and ``state_dict``
    share no memory.
    """
    seen: dict[str, Any] = {}

    def remember(_: Optimizer, final: dict[str, Any]) -> None:
        seen.update(final)

    def restore(_: Optimizer) -> None:
        saved_ids = [i for group in seen["param_groups"] for i in group["params"]]
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for saved_id, param in zip(saved_ids, params, strict=True):
            for key, value in seen["state"].get(saved_id, {}).items():
                if isinstance(value, Tensor):
                    dtype = torch.float32 if key == "step" else compute_dtype(param)
                    optimizer.state[param][key] = _copy_like(param, value, dtype)

    handles = [
        optimizer.register_load_state_dict_pre_hook(remember),
        optimizer.register_load_state_dict_post_hook(restore, prepend=True),
    ]
    try:
        load(state_dict)
    finally:
        for handle in handles:
            handle.remove()


def _copy_like(param: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy of ``value`` on the parameter's device, laid out in memory as the parameter is."""
    if value.shape != param.shape:
        return value.detach().to(device=param.device, dtype=dtype, copy=True)
    return torch.empty_like(param, dtype=dtype, requires_grad=False).copy_(value)
