"""Deep Gradient Compression.

Source: Lin, Han, Mao, Wang and Dally, "Deep gradient compression: reducing the communication
    bandwidth for distributed
training" (2018), arXiv:1712.01887, algorithm 4 of the appendix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ring.comm.communicator import ChainedWork, Communicator, Work
from lightning_ring.errors import ConfigurationError, check_arguments
from lightning_ring.gradients.compression.between_nodes import MIN_NUMEL
from lightning_ring.gradients.compression.compressor import GradientLayout
from lightning_ring.gradients.compression.error_feedback import (
    ErrorFeedback,
    NamedBuffers,
    keep_if_finite,
)
from lightning_ring.gradients.compression.top_k import Largest, checked_ratio

WARM_UP_RATIOS = (0.25, 0.0625, 0.015625, 0.004)  # section 3.3: of an epoch each


class DGC(ErrorFeedback):
    """``compression="dgc"``: the largest 0.1 % of the accumulated gradients, with momentum before
    the accumulation.

    On each rank, for its gradient g::

        g ← g · min(1, N^(-1/2) · clip_norm / |g|)      local clipping, of each parameter's gradient
        u ← m·u + g                                     momentum correction
        v ← v + u                                       the error feedback
        the largest `ratio` of v in a bucket travel
        there v ← 0 and u ← 0                           factor masking

    Momentum is here, not in the optimizer: use plain SGD. A bucket that travels whole keeps its u.
    Between nodes, where ranks of a node send their average, u is masked where any node sent. The
    optimizer adds weight decay behind the momentum, so that it acts 1 - m times as strongly as in
    an SGD with momentum: divide it by 1 - m. The authors' code (``dgc/optim/sgd.py`` of
    github.com/synxlin/deep-gradient-compression) gives it a momentum of its own.

    Args:
        ratio: Share of a bucket's gradients that travels after the warm-up.
        momentum: m; 0 for optimizers that have one of their own.
        clip_norm: Of a gradient of a single parameter, as if all ranks' were added; `None` clips
            nothing.
        warmup_steps: Backward passes in which the share falls to ``ratio``, in four equal stages of
            25 %, 6.25 %, 1.5625 % and 0.4 %. The paper warms up for four epochs.
        min_numel: As of `BetweenNodes`.

    Raises:
        ConfigurationError: An argument cannot work.
    """

    def __init__(
        self,
        ratio: float = 0.001,
        momentum: float = 0.9,
        clip_norm: float | None = None,
        warmup_steps: int = 1000,
        min_numel: int = MIN_NUMEL,
    ) -> None:
        self._largest = Largest(checked_ratio("DGC", ratio), min_numel, "dgc")
        super().__init__(self._largest)
        check_arguments(
            "DGC",
            0 <= momentum < 1 and (clip_norm is None or clip_norm > 0) and warmup_steps >= 0,
            "a momentum from 0 to below 1, a norm above 0 or None, and 0 or more passes",
            momentum=momentum,
            clip_norm=clip_norm,
            warmup_steps=warmup_steps,
        )
        self.ratio = ratio
        self.momentum = momentum
        self.clip_norm = clip_norm
        self.warmup_steps = warmup_steps
        self.num_backwards = 0
        self._velocity = NamedBuffers()

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        found = {key for group in groups for key in ("momentum", "betas") if _is_set(group, key)}
        if self.momentum and found:
            raise ConfigurationError(
                f"compression 'dgc' has momentum={self.momentum}, and an optimizer has "
                f"{min(found)}: gradients would get momentum twice. Use torch.optim.SGD with "
                "momentum=0, or lightning_ring.gradients.compression.DGC(momentum=0)."
            )

    def velocity(self, name: str) -> Tensor:
        """This rank's u of the parameter ``name``, with its shape."""
        return self._velocity.of_parameter(name)

    def prepare(self, flat: Tensor, layout: GradientLayout) -> None:
        self._velocity.prepare(flat, layout)
        super().prepare(flat, layout)

    def forget_tensors(self) -> None:
        self._velocity.forget_tensors()
        super().forget_tensors()

    def start_again(self) -> None:
        self._velocity.zero_()
        super().start_again()

    def begin_backward(self) -> None:
        self._largest.ratio = self.ratio_of(self.num_backwards)
        self.num_backwards += 1
        super().begin_backward()

    def ratio_of(self, backward: int) -> float:
        """Share of the gradients that travels in the backward of this number, from 0."""
        if backward >= self.warmup_steps:
            return self.ratio
        return max(self.ratio, WARM_UP_RATIOS[len(WARM_UP_RATIOS) * backward // self.warmup_steps])

    def all_reduce(
        self, flat: Tensor, comm: Communicator, *, lost: Tensor | None = None, name: str = ""
    ) -> Work:
        self._clip(flat, comm.world_size)
        if not self.momentum:
            return super().all_reduce(flat, comm, name=name)
        velocity, before = self._velocity[flat], self._velocity.before(flat)
        new = torch.add(flat, velocity, alpha=self.momentum)
        flat.copy_(new)

        def arrived() -> None:
            self._mask(new, flat, comm)
            keep_if_finite(flat, [(velocity, new)])
            self._velocity.keep_unused(flat, before)

        self._largest.sent.pop(flat, None)
        return ChainedWork(super().all_reduce(flat, comm, name=name), arrived)

    def state_dict(self, comm: Communicator) -> dict[str, Any]:
        state = super().state_dict(comm)
        return state | {
            "num_backwards": self.num_backwards,
            "velocity": self._velocity.state(comm, "velocity"),
        }

    def load_state_dict(self, state: dict[str, Any], rank: int, world_size: int) -> str | None:
        if state:
            self.num_backwards = state["num_backwards"]
            if len(state["velocity"]) == world_size:
                self._velocity.load(state["velocity"][rank])
        return super().load_state_dict(state, rank, world_size)

    def _clip(self, flat: Tensor, world_size: int) -> None:
        if self.clip_norm is None:
            return
        gradients = self._velocity.layout(flat).views
        limit = self.clip_norm / world_size**0.5
        norms = torch._foreach_norm(gradients)
        torch._foreach_mul_(gradients, [(limit / norm).clamp(max=1.0) for norm in norms])

    def _mask(self, velocity: Tensor, average: Tensor, comm: Communicator) -> None:
        places = self._largest.sent.get(average)
        if places is None:  # it travelled whole
            return
        if comm.is_nested:
            velocity.masked_fill_(average != 0, 0.0)
        else:
            velocity.index_fill_(0, places, 0.0)


def _is_set(group: dict[str, Any], key: str) -> bool:
    value = group.get(key, 0)
    return bool(value[0] if isinstance(value, (tuple, list)) else value)
