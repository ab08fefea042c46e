"""An algorithm over another one, which averages its gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.optim import Optimizer

from lightning_ring.algorithms.algorithm import Algorithm, Backwards


class Delegating(Algorithm):
    """Hands what belongs to batches, their backwards and requests to stop to the algorithm
    `_gradients`.

    A subclass attaches and detaches that one, and overrides the calls to which it adds something.
    """

    _gradients: Algorithm

    @property
    def backwards(self) -> Backwards:  # type: ignore[override]
        return self._gradients.backwards

    def begin_batch(self, active_ranks: int | None = None) -> None:
        self._gradients.begin_batch(active_ranks)

    def forward(self, *, wait: bool = True) -> AbstractContextManager[None]:
        return self._gradients.forward(wait=wait)

    def backward(self) -> AbstractContextManager[None]:
        return self._gradients.backward()

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        self._gradients.before_step(optimizer, has_closure=has_closure)

    def after_step(self, optimizer: Optimizer) -> None:
        self._gradients.after_step(optimizer)

    def state_dict(self) -> dict[str, Any]:
        return self._gradients.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> str:
        return self._gradients.load_state_dict(state)

    def ask_to_stop(self, asked: bool = True) -> None:
        self._gradients.ask_to_stop(asked)

    def agreed_to_stop(self) -> bool:
        return self._gradients.agreed_to_stop()

    def progress(self) -> str:
        return self._gradients.progress()

    def description(self) -> str:
        return self._gradients.description()
