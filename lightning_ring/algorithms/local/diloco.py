"""DiLoCo: local steps, and an outer optimizer for what a round has changed.

Source: Douillard et al., "DiLoCo: distributed low-communication training of language models" (2023), arXiv:2311.08105,
algorithm 1, with its outer optimizer, SGD with Nesterov momentum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_ring.algorithms.local.local_sgd import LocalSGD
from lightning_ring.comm.communicator import Communicator
from lightning_ring.errors import ConfigurationError


class DiLoCo(LocalSGD):
    """After each round of ``every`` steps, from the parameters θ at its begin to w_r on rank r::

        Δ = θ - mean of all w      the outer gradient
        v ← outer_momentum · v + Δ
        θ ← θ - outer_lr · (Δ + outer_momentum · v)      on all ranks

    The inner optimizer's state stays with its rank. Evaluations and checkpoints within a round see the mean of all w.

    Args:
        every: Steps of a round; the paper takes 500.
        outer_lr, outer_momentum: Of the outer optimizer.
        others: As of `LocalSGD`.

    Raises:
        ConfigurationError: An argument cannot work.
    """

    def __init__(self, every: int = 500, outer_lr: float = 0.7, outer_momentum: float = 0.9, **others: Any) -> None:
        super().__init__(every, **others)
        if not outer_lr > 0 or not 0 <= outer_momentum < 1:
            raise ConfigurationError(
                f"DiLoCo got outer_lr={outer_lr!r}, outer_momentum={outer_momentum!r}; expected a learning rate above "
                "0, and a momentum from 0 to below 1."
            )
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum
        self._anchors: dict[Parameter, Tensor] = {}  # θ
        self._velocity: dict[Parameter, Tensor] = {}  # v

    def attach(self, module: Any, optimizers: Any, comm: Communicator, *others: Any, **named: Any) -> None:
        super().attach(module, optimizers, comm, *others, **named)
        self._begin_first_round()

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
                tensors[params[name]] = torch.empty_like(params[name]).copy_(saved)
        return super().load_state_dict(state)

    def _begin_first_round(self) -> None:
        self._anchors, self._velocity = {}, {}
        self._follow_module()

    def _follow_module(self) -> None:
        """Parameters that began to be trained have been the same on all ranks until now."""
        for param in self._parameters():
            if param not in self._anchors:
                self._anchors[param] = param.detach().clone()
                self._velocity[param] = torch.zeros_like(param)

    @torch.no_grad()
    def _use_averages(self) -> None:
        self._follow_module()
        params: list[Tensor] = list(self._parameters())
        anchors, velocity = (
            [tensors[param] for param in self._parameters()] for tensors in (self._anchors, self._velocity)
        )
        change = torch._foreach_sub(anchors, params)
        torch._foreach_mul_(velocity, self.outer_momentum)
        torch._foreach_add_(velocity, change)
        torch._foreach_add_(change, velocity, alpha=self.outer_momentum)
        torch._foreach_add_(anchors, change, alpha=-self.outer_lr)
        torch._foreach_copy_(params, anchors)

    def _exchange(self) -> str:
        return f"an outer step (lr {self.outer_lr:g}, momentum {self.outer_momentum:g}) follows"
