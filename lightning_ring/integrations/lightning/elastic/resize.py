"""Learning rates when the number of ranks changes: kept or scaled, and always said."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from lightning_ring.elastic.membership import counted_ranks
from lightning_ring.errors import ConfigurationError
from lightning_ring.integrations.lightning.elastic.position import TrainingPosition

if TYPE_CHECKING:
    from lightning_ring.integrations.lightning.elastic.strategy import ElasticStrategy

ResizeLR = Literal["keep", "linear", "sqrt"] | Callable[[int, int], float]
# Also what torch's schedulers keep in groups.
_RATES_OF_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
# The last two are those below which a schedule does not go.
_RATES_OF_SCHEDULERS = ("base_lrs", "max_lrs", "_last_lr", "eta_min", "min_lrs")
_RULES: dict[str, Callable[[int, int], float]] = {
    "keep": lambda old, new: 1.0,
    "linear": lambda old, new: new / old,
    "sqrt": lambda old, new: math.sqrt(new / old),
}


class Resize:
    """Scales learning rates for the number of ranks. ``rule`` is ``resize_lr``.

    Attributes:
        num_ranks: Of the last finished step, for which the learning rates were chosen.
    """

    def __init__(self, rule: ResizeLR) -> None:
        self.num_ranks = 0
        self._name = rule if isinstance(rule, str) else getattr(rule, "__name__", repr(rule))
        self._factor = _RULES[rule] if isinstance(rule, str) else rule
        self._kept: list[tuple[dict[str, Any], str, Any]] = []  # the rates for `num_ranks`
        self._said = 0

    def finish_step(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._kept = []

    def apply(self, strategy: ElasticStrategy, position: TrainingPosition, step: int) -> None:
        """Before each attempt of a step: scale the learning rates of the last finished step for the
        current ranks. Say so on rank 0.

        Raises:
            ConfigurationError: The user's function returned no positive number.
        """
        old, new = self.num_ranks, strategy.world_size
        for owner, name, value in self._kept:
            _set(owner, name, value)
        self._kept = []
        if old == new:
            return
        schedulers = [config.scheduler for config in strategy.lr_scheduler_configs]
        stay_at_the_end(schedulers)
        factor = self._factor(old, new)
        if not isinstance(factor, int | float) or not (math.isfinite(factor) and factor > 0):
            raise ConfigurationError(
                f"resize_lr={self._name} returned {factor!r} for {old} and {new} ranks, "
                "expected the positive number by which learning rates are multiplied."
            )
        before = _shown(strategy.optimizers)
        if factor != 1.0:
            self._kept = scale_learning_rates(strategy.optimizers, schedulers, factor)
        if self._said != new:
            self._said = new
            samples = position.batch_size * strategy.fit_trainer.accumulate_grad_batches
            rates = before if factor == 1.0 else f"{before} -> {_shown(strategy.optimizers)}"
            rank_zero_info(
                f"lightning_ring: {counted_ranks(new)} instead of {old} after step {step}: "
                f"a step takes {samples * new} samples instead of {samples * old}, "
                f"learning rate {rates} (resize_lr={self._name!r})."
            )


def scale_learning_rates(
    optimizers: Sequence[Optimizer], schedulers: Sequence[Any], factor: float
) -> list[tuple[dict[str, Any], str, Any]]:
    """Multiply the learning rates of ``optimizers`` and ``schedulers``, in place.

    Returns:
        What was there before: owner, name and value of each.
    """
    owners = [group for optimizer in optimizers for group in optimizer.param_groups]
    places = [(owner, name) for owner in owners for name in _RATES_OF_GROUPS if name in owner]
    for scheduler in _with_inner(schedulers):
        owner = vars(scheduler)
        places += [(owner, name) for name in _RATES_OF_SCHEDULERS if name in owner]
    kept: list[tuple[dict[str, Any], str, Any]] = []
    scaled: set[int] = set()  # groups share the tensor with which their optimizer was made
    for owner, name in places:
        value = owner[name]
        if isinstance(value, Tensor):
            if id(value) not in scaled:
                scaled.add(id(value))
                kept.append((owner, name, value.clone()))
                value.mul_(factor)
        elif isinstance(value, int | float):
            kept.append((owner, name, value))
            owner[name] = value * factor
        elif isinstance(value, list):
            kept.append((owner, name, value))
            owner[name] = [rate * factor for rate in value]
    return kept


def _set(owner: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        owner[name].copy_(value)
    else:
        owner[name] = value


def _with_inner(schedulers: Sequence[Any]) -> Iterator[Any]:
    for scheduler in schedulers:
        yield scheduler
        yield from _with_inner(getattr(scheduler, "_schedulers", []))


class _Staying(OneCycleLR):
    """Keeps the rates of its last step, where `OneCycleLR` raises."""

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch < self.total_steps - 1:
            super().step(epoch)


def stay_at_the_end(schedulers: Sequence[Any]) -> None:
    """Let each `OneCycleLR` keep its last rates: fewer ranks take more steps. In place."""
    for scheduler in _with_inner(schedulers):
        if type(scheduler) is OneCycleLR:
            scheduler.__class__ = _Staying  # an attribute would be saved with its state


def _shown(optimizers: Sequence[Optimizer]) -> str:
    rates = dict.fromkeys(
        f"{float(group['lr']):g}" for optimizer in optimizers for group in optimizer.param_groups
    )
    return ", ".join(rates)
