"""DiLoCo: local steps, and an outer optimizer for what a round has changed.

Source: Douillard et al., "DiLoCo: distributed low-communication training of language models"
(2023), arXiv:2311.08105, algorithm 1, with its outer optimizer, SGD with Nesterov momentum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_ring.algorithms.local.local_sgd import LocalSGD
from lightning_ring.algorithms.own_pace import check_same_parameters
from lightning_ring.comm.replicate import average_tensors
from lightning_ring.errors import check_arguments


class DiLoCo(LocalSGD):
    """After each round of ``every`` steps, from the parameters θ at its begin to w_r on rank r::

        Δ = mean of all θ - w      the outer gradient
        v ← outer_momentum · v + Δ
        θ ← θ - outer_lr · (Δ + outer_momentum · v)      on all ranks
        w_r ← θ

    The inner optimizer's state stays with its rank. Evaluations and checkpoints within a round see
    the mean of all w. The same parameters are trained from the first round to the end.

    Args:
        every: Steps of a round; the paper takes 100 to 500.
        outer_lr, outer_momentum: Of the outer optimizer.
        others: As of `LocalSGD`.

    Raises:
        ConfigurationError: An argument cannot work.
    """

    def __init__(
        self, every: int = 500, outer_lr: float = 0.7, outer_momentum: float = 0.9, **others: Any
    ) -> None:
        super().__init__(every, **others)
        check_arguments(
            "DiLoCo",
            outer_lr > 0 and 0 <= outer_momentum < 1,
            "a learning rate above 0, and a momentum from 0 to below 1",
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
        )
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum
        self._exchange = (
            f"an outer step (lr {outer_lr:g}, momentum {outer_momentum:g}) follows their average "
            "change"
        )
        self._anchors: dict[Parameter, Tensor] = {}  # θ
        self._velocity: dict[Parameter, Tensor] = {}  # v

    # -- rounds

    def begin_batch(self, active_ranks: int | None = None) -> None:
        super().begin_batch(active_ranks)
        if self.num_steps > self.warmup_steps:
            # momentum would move a frozen one
            check_same_parameters(self._trained(), [*self._anchors], "DiLoCo")
        elif set(self._trained()) != self._anchors.keys():
            self._begin_first_round()

    def _begin_first_round(self) -> None:
        params = self._trained()
        self._anchors = {param: param.detach().clone() for param in params}
        self._velocity = {param: torch.zeros_like(param) for param in params}

    def _trained(self) -> list[Parameter]:
        return [param for param in self._module.parameters() if param.requires_grad]

    @torch.no_grad()
    def _average_parameters(self) -> None:
        params: list[Tensor] = [*self._anchors]
        anchors, velocity = [*self._anchors.values()], [*self._velocity.values()]
        change = [*torch._foreach_sub(anchors, params)]
        average_tensors(change, self._comm, f"step {self.num_steps}: outer gradients")
        torch._foreach_mul_(velocity, self.outer_momentum)
        torch._foreach_add_(velocity, change)
        torch._foreach_add_(change, velocity, alpha=self.outer_momentum)
        torch._foreach_add_(anchors, change, alpha=-self.outer_lr)
        torch._foreach_copy_(params, anchors)
        self._apart.clear()

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        names = {param: name for name, param in self._module.named_parameters()}
        outer = {
            key: {names[param]: tensor.clone() for param, tensor in tensors.items()}
            for key, tensors in (("anchors", self._anchors), ("velocity", self._velocity))
        }
        return super().state_dict() | outer

    def load_state_dict(self, state: dict[str, Any]) -> str:
        self._begin_first_round()  # from the checkpoint's parameters, which are loaded by now
        params = dict(self._module.named_parameters())
        for key, tensors in (("anchors", self._anchors), ("velocity", self._velocity)):
            for name, saved in state.get(key, {}).items():
                if (param := params[name]) in tensors:
                    tensors[param].copy_(saved)
        return super().load_state_dict(state)
