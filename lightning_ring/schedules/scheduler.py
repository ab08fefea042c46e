"""The scheduler that applies a schedule to an optimizer."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_ring.schedules.warmup import Schedule

MomentumForm = Literal["paper", "torch"]


class WarmupLR(LRScheduler):
    """Each group's learning rate is its initial one times ``schedule(step)``.

    Call `step` once after each optimizer step; Lightning does with ``interval="step"``, accumulated
    micro-batches counting as the one step that they are. The learning rate follows from the step
    count alone, so that a resumed run goes on exactly; the schedule itself is not saved, and the
    one given here counts.

    Args:
        optimizer: Any optimizer.
        schedule: Function from step (0 is the first) to factor: one of
            ``lightning_ring.schedules``, or yours.
        momentum_correction: With a learning rate that changes, SGD depends on where momentum keeps
            it: inside the buffer (``"paper"``: ``v = mu * v + lr * g; w -= v``) or outside
            (``"torch"``: ``v = mu * v + g; w -= lr * v``, as `torch.optim.SGD` and LARS with
            ``momentum_form="torch"`` have it). Name the form whose trajectory you want: groups of
            the other form get ``mu * lr[t] / lr[t - 1]`` (paper's group, torch's trajectory: Goyal
            et al. 2017, arXiv:1706.02677, remark 3) or ``mu * lr[t - 1] / lr[t]`` (torch's group,
            paper's trajectory) as their momentum. Where either learning rate is 0, momentum stays
            as it is. None changes no momentum.
        last_epoch: The last step taken, -1 to begin.

    Raises:
        ValueError: ``schedule`` gives a factor that is negative or not a number at step 0; or
            ``momentum_correction`` with Nesterov momentum, for which the correction does not hold,
            or without a group that has ``momentum``.

    Examples:
        >>> optimizer = LARS(model.parameters(), lr=linear_scaled_lr(0.1, 8192))
        >>> scheduler = WarmupLR(optimizer, warmup_poly(total=90, warmup=5, steps_per_epoch=156))
        >>> every_step = {"scheduler": scheduler, "interval": "step"}
        >>> return {"optimizer": optimizer, "lr_scheduler": every_step}
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Schedule,
        momentum_correction: MomentumForm | None = None,
        last_epoch: int = -1,
    ) -> None:
        if not callable(schedule):
            raise ValueError(
                f"schedule={schedule!r}, expected a function from step to factor: warmup_poly(...)"
            )
        factor = schedule(0)
        if not factor >= 0:
            raise ValueError(f"schedule(0) is {factor}, expected a factor >= 0")
        self._schedule = schedule
        self._momentum_correction = momentum_correction
        self.base_momentums = [group.get("momentum") for group in optimizer.param_groups]
        if momentum_correction is not None:
            _check_correctable(optimizer, momentum_correction)
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """The groups' learning rates at step ``last_epoch``."""
        factor = self._schedule(self.last_epoch)
        return [base_lr * factor for base_lr in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        """Go on to the next step's learning rate (or, with ``epoch``, to that step's)."""
        super().step(epoch)
        if self._momentum_correction is None:
            return
        now = self._schedule(self.last_epoch)
        before = self._schedule(max(self.last_epoch - 1, 0))
        change = now / before if now > 0 and before > 0 else 1.0
        for group, momentum in zip(self.optimizer.param_groups, self.base_momentums, strict=True):
            # torch's own optimizers keep the learning rate outside
            form = group.get("momentum_form", "torch")
            if momentum is None or form == self._momentum_correction:
                continue
            group["momentum"] = momentum * (
                change if self._momentum_correction == "torch" else 1 / change
            )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint, without optimizer and schedule."""
        unsaved = ("_schedule", "_momentum_correction")
        return {name: value for name, value in super().state_dict().items() if name not in unsaved}


def _check_correctable(optimizer: Optimizer, momentum_correction: str) -> None:
    if momentum_correction not in ("paper", "torch"):
        raise ValueError(
            f"momentum_correction={momentum_correction!r}, expected 'paper', 'torch' or None"
        )
    if not any("momentum" in group for group in optimizer.param_groups):
        raise ValueError(
            f"momentum_correction is for momentum; {type(optimizer).__name__} has "
            "none, leave it None"
        )
    if any(group.get("nesterov") for group in optimizer.param_groups):
        raise ValueError(
            "momentum_correction does not hold for nesterov=True; use the form that "
            "you want instead"
        )
