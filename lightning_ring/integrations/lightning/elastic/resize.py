"""Learning rates when the number of ranks changes: kept or scaled, and always said."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from lightning_ring.errors import ConfigurationError
from lightning_ring.integrations.lightning.elastic.position import TrainingPosition

if TYPE_CHECKING:
    from lightning_ring.integrations.lightning.elastic.strategy import ElasticStrategy

ResizeLR = Literal["keep", "linear", "sqrt"] | Callable[[int, int], float]
REMEMBERED = 8  # views: a rank may miss as many in a row, less one
# also what torch's schedulers keep in groups
_RATES_OF_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
_RATES_OF_SCHEDULERS = ("base_lrs", "max_lrs", "_last_lr")
_RULES: dict[str, Callable[[int, int], float]] = {
    "keep": lambda old, new: 1.0,
    "linear": lambda old, new: new / old,
    "sqrt": lambda old, new: math.sqrt(new / old),
}


class Resize:
    """Follows the number of ranks. ``rule`` is `ElasticStrategy`'s ``resize_lr``."""

    def __init__(self, rule: ResizeLR) -> None:
        self._name = rule if isinstance(rule, str) else getattr(rule, "__name__", repr(rule))
        self._factor = _RULES[rule] if isinstance(rule, str) else rule
        # The last views for which rates were scaled, in turn: generation and number of ranks
        self._views: deque[tuple[int, int]] = deque(maxlen=REMEMBERED)

    def begin(self, generation: int, world_size: int) -> None:
        """The learning rates are those for ``world_size`` ranks, from the view ``generation``
        on.
        """
        self._views.clear()
        self._views.append((generation, world_size))

    @property
    def views(self) -> list[tuple[int, int]]:
        return list(self._views)

    @property
    def latest(self) -> tuple[int, int]:
        return self._views[-1]

    def missed(self, of_ranks: Sequence[list[tuple[int, int]]]) -> list[tuple[int, int]]:
        """The views for which others have scaled their rates and this rank has not, in turn.
        ``of_ranks``: the `views` of all.

        A rank that dies while the others enter a view keeps some of them from it. If these then
        scaled their rates by one factor, and the others by two, the products could differ in the
        last bit.

        Returns:
            Generation and number of ranks of each.
        """
        last = self._views[-1] if self._views else (0, 0)
        return sorted({view for views in of_ranks for view in views if view > last})

    def apply(
        self,
        strategy: ElasticStrategy,
        position: TrainingPosition | None,
        view: tuple[int, int],
        step: int,
    ) -> None:
        """Scale the learning rates for a ``view``, a generation and its number of ranks, and say so
        on rank 0.

        Raises:
            ConfigurationError: The user's function returned no positive number.
        """
        if not self._views:
            return
        (_, old), (_, world_size) = self._views[-1], view
        self._views.append(view)
        if old == world_size:
            return
        schedulers = [config.scheduler for config in strategy.lr_scheduler_configs]
        stay_at_the_end(schedulers)
        factor = self._factor(old, world_size)
        if not isinstance(factor, int | float) or not (math.isfinite(factor) and factor > 0):
            raise ConfigurationError(
                f"resize_lr={self._name} returned {factor!r} for {old} and {world_size} ranks, "
                "expected the positive number by which learning rates are multiplied."
            )
        before = _shown(strategy.optimizers)
        if factor != 1.0:
            scale_learning_rates(strategy.optimizers, schedulers, factor)
        trainer = strategy.fit_trainer
        of_a_rank = (
            position.batch_size if position is not None else 0
        ) * trainer.accumulate_grad_batches
        batch = (
            f"a step takes {of_a_rank * world_size} samples instead of {of_a_rank * old}, "
            if of_a_rank
            else ""
        )
        rank_zero_info(
            f"lightning_ring: {world_size} ranks instead of {old} after step {step}: "
            f"{batch}learning rate {before} -> {_shown(strategy.optimizers)} "
            f"(resize_lr={self._name!r})."
        )


def scale_learning_rates(
    optimizers: Sequence[Optimizer], schedulers: Sequence[Any], factor: float
) -> None:
    """Multiply all learning rates that ``optimizers`` have and that ``schedulers`` start from,
    in place.
    """
    scaled: set[int] = set()  # groups share the tensor with which their optimizer was made
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name in _RATES_OF_GROUPS:
                if isinstance(value := group.get(name), Tensor):
                    if id(value) not in scaled:
                        value.mul_(factor)
                        scaled.add(id(value))
                elif isinstance(value, int | float):
                    group[name] = value * factor
    for scheduler in schedulers:
        for name in _RATES_OF_SCHEDULERS:
            if isinstance(rates := getattr(scheduler, name, None), list):
                setattr(scheduler, name, [rate * factor for rate in rates])
        for name in ("eta_min", "min_lrs"):  # below which a schedule does not go
            if isinstance(value := getattr(scheduler, name, None), list):
                setattr(scheduler, name, [rate * factor for rate in value])
            elif isinstance(value, int | float):
                setattr(scheduler, name, value * factor)
        scale_learning_rates([], getattr(scheduler, "_schedulers", []), factor)


class _Staying(OneCycleLR):
    """Keeps the rates of its last step, where `OneCycleLR` raises."""

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch < self.total_steps - 1:
            super().step(epoch)


def stay_at_the_end(schedulers: Sequence[Any]) -> None:
    """Let each `OneCycleLR` keep its last rates: fewer ranks take more steps than it was made
    for. In place.
    """
    for scheduler in schedulers:
        if type(scheduler) is OneCycleLR:
            scheduler.__class__ = _Staying  # an attribute would be saved with its state
        stay_at_the_end(getattr(scheduler, "_schedulers", []))


def _shown(optimizers: Sequence[Optimizer]) -> str:
    rates = dict.fromkeys(
        f"{float(group['lr']):g}" for optimizer in optimizers for group in optimizer.param_groups
    )
    return ", ".join(rates)
