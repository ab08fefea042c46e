"""The parameters of an optimizer in one fixed order, and the parameters of one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from lightning_ring.optim.engine.sent_tables import SentTables

LOW_PRECISION = (torch.bfloat16, torch.float16)
DTYPE_AND_DEVICE = attrgetter("dtype", "device")


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
    way: str  # to run: `way_to_run`


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

    def columns(self) -> list[Sequence[Tensor]]:
        """Weights, gradients, and each of the states."""
        return [self.weights, self.grads, *zip(*self.states, strict=True)]


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
        self._groups = torch.arange(len(groups)).repeat_interleave(torch.tensor(self.sizes))
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

    def places(self, part: ParameterBatch, device: torch.device | None = None) -> slice | Tensor:
        """Where the parameters of ``part`` stand in this list, to index tensors on ``device``
        (`None`: that of the list).
        """
        positions, device = part.positions, device or self.device
        if len(positions) == len(self.params):
            return slice(None)
        key = "places", device, tuple(positions)
        return self.tables.get(key, None, device, lambda: torch.tensor(positions))

    def groups_of(self, part: ParameterBatch, device: torch.device) -> Tensor:
        """The group of each of the parameters of ``part``, on ``device``."""
        groups = self.tables.get(("groups", device), self.sizes, device, lambda: self._groups)
        return groups[self.places(part, device)]

    def hyper_table(self, groups: list[dict[str, Any]], device: torch.device) -> Tensor:
        """Hyper-parameters of each group as a float64 tensor on ``device``, shape [groups,
        hyper-parameters]; sent only when they change. The host reads no tensor that is there.
        """

        def is_there(value: Any) -> bool:
            return isinstance(value, Tensor) and value.device.type == device.type

        rows = [
            [0.0 if is_there(value) else float(value) for value in group.values()]
            for group in groups
        ]
        key = "hyper-parameters", device
        table = self.tables.get(key, rows, device, lambda: torch.tensor(rows, dtype=torch.float64))
        there = {
            (row, column): value
            for row, group in enumerate(groups)
            for column, value in enumerate(group.values())
            if is_there(value)
        }
        if there:
            table = table.clone()
        for place, value in there.items():
            table[place] = value
        return table

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
    if all(map(Tensor.is_contiguous, tensors)):
        return True
    is_dense: bool = torch.ops.aten.is_non_overlapping_and_dense(tensors[0])
    return is_dense and len(set(map(Tensor.stride, tensors))) == 1


def flat(tensor: Tensor) -> Tensor:
    """1-D view of a tensor that `lie_alike` found without gaps, in memory order."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def signature(params: list[Tensor], state: Mapping[Tensor, Any]) -> list[Any]:
    """Everything by which parameters are sorted into batches. `map` calls these from C: loops in
    Python over all parameters would cost the host most of a fused step.
    """
    grads = [param.grad for param in params]
    tensors = params + [grad for grad in grads if grad is not None]
    strided = [tensor for tensor in tensors if tensor.layout is torch.strided]
    values = chain.from_iterable(map(dict.values, state.values()))
    return [
        [grad is None for grad in grads],
        list(map(Tensor.stride, strided)),
        list(map(DTYPE_AND_DEVICE, tensors)),
        list(map(id, values)),
    ]
