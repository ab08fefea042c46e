"""The interface of a compressor: gradients that travel as something shorter than they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ring.comm.communicator import Communicator, Work
from lightning_ring.errors import ConfigurationError


class GradientLayout(Protocol):
    """The gradients that lie in a flat tensor; a `Bucket` is one.

    Attributes:
        names: Of the parameters.
        views: The gradients, as dense views of the flat tensor with the parameters' shapes.
        contributed: For each whether this rank has a gradient in this backward. A gradient that no
            rank has is not handed to its parameter, whatever arrives.
        used: Once a collective has ended: positive for each gradient that some rank has.
    """

    names: list[str]
    views: list[Tensor]
    contributed: list[bool]
    used: Tensor


class Compressor(ABC):
    """Averages flat tensors of gradients in its own way. A subclass writes `all_reduce`; the rest
    has defaults.

    Every method but `accepts` is called on all ranks, in the same order and in the
    thread that runs backward; so is `Work.wait` of the works it returns, which may start further
    collectives of the communicator.

    Attributes:
        name: How messages call it.
        can_shard: Whether it offers `reduce_scatter`, which a sharded optimizer needs.
        buffer_dtype: If set, the flat tensors handed to it have this dtype: gradients are converted
            while they are copied together, and their average is converted back. `prepare` is not
            called then.
    """

    name: str = "a compressor"
    can_shard: ClassVar[bool] = False
    buffer_dtype: torch.dtype | None = None

    def __repr__(self) -> str:
        """Without an address: error messages are the same on every rank."""
        return f"{type(self).__name__}()"

    def accepts(self, dtype: torch.dtype) -> bool:
        """Whether it sends gradients of ``dtype``; the others travel as they are."""
        return dtype is torch.float32

    def is_lossy(self) -> bool:
        """Whether the messages of this backward lose anything."""
        return True

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:  # noqa: B027
        """Raise `ConfigurationError` for optimizers that this compressor does not work with."""

    def prepare(self, flat: Tensor, layout: GradientLayout) -> None:  # noqa: B027
        """The tensor ``flat`` will be sent, again and again. It replaces those that held the
        same parameters.
        """

    def forget_tensors(self) -> None:  # noqa: B027
        """The tensors of `prepare` so far are not sent again: drop them, and keep what belongs
        to parameters.
        """

    def begin_backward(self) -> None:  # noqa: B027
        """A backward whose gradients will be sent begins."""

    def start_again(self) -> None:  # noqa: B027
        """Averages of the last backward were dropped, because it raised. Forget what was left
        out of them.
        """

    @abstractmethod
    def all_reduce(
        self, flat: Tensor, comm: Communicator, *, lost: Tensor | None = None, name: str = ""
    ) -> Work:
        """Start to replace 1-D ``flat`` by its average over ranks. All ranks end with the same
        bits.

        Args:
            flat: Gradients of this rank, and zeros between them.
            comm: The ranks, and the collectives.
            lost: If given, of the size of ``flat``: when the work has ended it is to hold the part
                of this rank's gradients that did not travel (`ErrorFeedback`). Where the average is
                not finite it stays as it was.
            name: Of the collectives, for errors and traces.
        """

    def reduce_scatter(self, flat: Tensor, comm: Communicator, *, name: str = "") -> Work:
        """The same, but only for the shard ``comm.shard_index`` of ``flat``; the rest of it is
        scratch.

        The shard gets the bits that `all_reduce` would give it.
        """
        raise ConfigurationError(
            f"{self.name} cannot leave each rank its shard of an average; use 'bf16' or 'int8'."
        )

    def state_dict(self, comm: Communicator) -> dict[str, Any]:
        """What a checkpoint needs, of all ranks; collective. Empty if nothing is kept from step
        to step.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any], rank: int, world_size: int) -> str | None:
        """Go on from `state_dict`. Returns what the user should know if that was not possible."""
        return None


def counterpart(other: Tensor, flat: Tensor, part: Tensor) -> Tensor:
    """The elements of ``other`` at the place of ``part`` in ``flat``, with the shape of
    ``part``.
    """
    start = part.storage_offset() - flat.storage_offset()
    return other[start : start + part.numel()].view_as(part)


def bounds_of(flat: Tensor, layout: GradientLayout) -> list[tuple[int, int]]:
    """Start and end of each gradient in ``flat``, in the order of memory."""
    return sorted(
        (start := int(view.storage_offset() - flat.storage_offset()), start + view.numel())
        for view in layout.views
    )
