"""The optimizer of a server: a twin of the user's, over the pieces that the server holds."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer, SparseAdam

from lightning_ring.algorithms.server.layout import ServerLayout, ServerPiece
from lightning_ring.algorithms.sharded.elementwise import check_can_be_sharded
from lightning_ring.errors import ConfigurationError

State = dict[Any, dict[str, Any]]
Settings = list[dict[str, Any]]  # of each group: learning rate and the like


def trained_parameters(optimizer: Optimizer) -> list[Parameter]:
    """Those that the servers hold, in the order of the groups."""
    return [
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if param.requires_grad
    ]


def refuse_optimizers(optimizers: Sequence[Optimizer], name: str) -> None:
    """Raise `ConfigurationError` where servers cannot step ``optimizers``."""
    if len(optimizers) > 1:
        raise ConfigurationError(
            f"{name} got {len(optimizers)} optimizers, and its servers take a step of one with "
            "each gradient that comes. Use one optimizer for all parameters, or algorithm='ring'."
        )
    for optimizer in optimizers:
        why = {
            LBFGS: "asks for gradients within a step",
            SparseAdam: "takes sparse gradients alone",
        }.get(type(optimizer))
        if why is not None:
            raise ConfigurationError(
                f"{name} got the optimizer {type(optimizer).__name__}, which {why}, and servers "
                "have one dense gradient a step. Use another optimizer, or algorithm='ring'."
            )


def can_be_cut(optimizer: Optimizer) -> bool:
    """Whether the step of an element depends on no other one, so that a parameter may lie on
    several servers.
    """
    if hasattr(optimizer, "norm_all_reduce"):  # LARS, LAMB: norms of whole parameters
        return False
    try:
        check_can_be_sharded(optimizer)
    except ConfigurationError:
        return False
    return True


def settings_of(optimizer: Optimizer) -> Settings:
    """All but the parameters of each group, as plain numbers."""
    return [
        {
            key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        for group in optimizer.param_groups
    ]


class Twin:
    """A twin of ``optimizer`` over the pieces of ``layout``, on the CPU, with their part of its
    state.

    Attributes:
        weights: A parameter for each piece: of the same shape where it is whole, else 1-D.
    """

    def __init__(
        self, optimizer: Optimizer, params: Sequence[Parameter], layout: ServerLayout
    ) -> None:
        self.layout = layout
        self.weights = [
            Parameter(_cut(piece, params[piece.index], params[piece.index]))
            for piece in layout.pieces
        ]
        self._given = settings_of(optimizer)
        self._managed: set[tuple[int, str]] = set()  # group and key that the user has changed since
        held: dict[int, list[Parameter]] = {id(params[piece.index]): [] for piece in layout.pieces}
        for piece, weight in zip(layout.pieces, self.weights, strict=True):
            held[id(params[piece.index])].append(weight)
        # by number, those of which this server has a piece
        self._groups: dict[int, dict[str, Any]] = {}
        for number, group in enumerate(optimizer.param_groups):
            if weights := [
                weight for param in group["params"] for weight in held.get(id(param), [])
            ]:
                self._groups[number] = copy.deepcopy(self._given[number]) | {"params": weights}
                if "capturable" in group:  # into a graph of a GPU's
                    self._groups[number]["capturable"] = False
        self._optimizer = _twin(optimizer, list(self._groups.values()))
        for piece, weight in zip(layout.pieces, self.weights, strict=True):
            param = params[piece.index]
            if state := optimizer.state.get(param):
                self._optimizer.state[weight] = {
                    key: _cut(piece, value, param) for key, value in state.items()
                }

    def use(self, settings: Settings) -> None:
        """Step as the user's optimizer is set now; what an optimizer changes in its groups
        itself stays.
        """
        for number, (given, now) in enumerate(zip(self._given, settings, strict=True)):
            self._managed |= {
                (number, key) for key, value in now.items() if value != given.get(key)
            }
        for number, key in self._managed:
            if number in self._groups:
                self._groups[number][key] = settings[number][key]

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """``gradients``: one a piece, 1-D; `None` for a piece that is not to be stepped."""
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = None if gradient is None else gradient.view(weight.shape)
        if self._groups:
            with torch.enable_grad():  # as in a loop: some optimizers look
                self._optimizer.step()
        for weight in self.weights:
            weight.grad = None

    def state(self) -> list[dict[str, Any]]:
        """That of each piece."""
        return [self._optimizer.state.get(weight, {}) for weight in self.weights]


def whole_state(
    params: Sequence[Parameter], servers: Sequence[tuple[ServerLayout, Sequence[dict[str, Any]]]]
) -> dict[Parameter, dict[str, Any]]:
    """The optimizer's state by parameter, from the states of all servers' pieces."""
    whole: dict[Parameter, dict[str, Any]] = {}
    for layout, states in servers:
        for piece, state in zip(layout.pieces, states, strict=True):
            param = params[piece.index]
            for key, value in state.items():
                mine = whole.setdefault(param, {})
                length = piece.stop - piece.start
                if (
                    not isinstance(value, Tensor)
                    or length == param.numel()
                    or value.shape != (length,)
                ):
                    mine[key] = value  # of the whole parameter
                else:
                    if key not in mine:
                        mine[key] = torch.empty(param.shape, dtype=value.dtype)
                    piece.of(mine[key]).copy_(value)
    return whole


def _cut(piece: ServerPiece, value: Any, param: Tensor) -> Any:
    """A copy of the part of ``value`` on the CPU; of all of it, where it has not one number for
    each element.
    """
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if value.shape != param.shape or piece.stop - piece.start == param.numel():
        return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return piece.of(value).to("cpu", copy=True)


def _twin(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer of the same class and settings over other parameters, without hooks and
    state.
    """
    left_out = ("step", "state", "param_groups")  # schedulers patch an object's `step`
    kept = {
        k: v
        for k, v in vars(optimizer).items()
        if k not in left_out and not k.startswith("_optimizer_")
    }
    made: Optimizer = object.__new__(type(optimizer))
    state: Mapping[str, Any] = kept | {"state": defaultdict(dict), "param_groups": groups}
    made.__setstate__(dict(state))
    return made
