"""What a rank holds of the training's state, in pieces that it can send while it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A parameter, or a part of it.

    Attributes:
        index: Of the parameter in the module.
        first: Where the part begins within the parameter, in elements in the order of memory.
            `None`: all of it.
        values: The piece itself, 1-D if it is a part.
        strides: The order of memory of the parameter.
        key: Its key in the state of optimizers.
        gradient: Its averaged gradient, before a step.
    """

    index: int
    first: int | None
    values: Tensor
    strides: tuple[int, ...]
    key: Any
    gradient: Callable[[], Tensor | None]


@dataclass(frozen=True, slots=True)
class Holdings:
    """The pieces of one rank. ``senders`` ranks together hold the whole.

    Attributes:
        states: The state of each optimizer, by keys of pieces. It may be called from any thread.
        is_current: Whether the pieces are still those that the optimizers step.
        generation: Of the ranks among which the state is divided.
    """

    module: nn.Module
    optimizers: Sequence[Optimizer]
    pieces: Sequence[Piece]
    states: Callable[[], Sequence[Mapping[Any, Any]]]
    is_current: Callable[[], bool] = lambda: True
    senders: int = 1
    generation: int = 0


def whole_state(module: nn.Module, optimizers: Sequence[Optimizer]) -> Holdings:
    """Of a rank that holds all parameters and all optimizer state."""

    def piece(index: int, param: nn.Parameter) -> Piece:
        return Piece(index, None, param, param.stride(), param, lambda: param.grad)

    pieces = [piece(index, param) for index, param in enumerate(module.parameters())]
    return Holdings(
        module, optimizers, pieces, lambda: [optimizer.state for optimizer in optimizers]
    )
