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
from torch.utils._pytree import tree_leaves

from lightning_ring.comm.communicator import ChainedWork, Communicator, Work
from lightning_ring.errors import ConfigurationError, check_arguments
from lightning_ring.gradients.compression.between_nodes import MIN_NUMEL
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
        self._parts.append(self._velocity)

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        keys = [(group, key) for group in groups for key in ("momentum", "betas")]
        found = {key for group, key in keys if tree_leaves(group.get(key, 0))[0]}
        if self.momentum and found:
            raise ConfigurationError(
                f"compression 'dgc' has momentum={self.momentum}, and an optimizer has "
                f"{min(found)}: gradients would get momentum twice. Use torch.optim.SGD with "
                "momentum=0, or lightning_ring.gradients.compression.DGC(momentum=0)."
            )

    def velocity(self, name: str) -> Tensor:
        """This rank's u of the parameter ``name``, with its shape."""
        return self._velocity.of_parameter(name)

    def begin_backward(self) -> None:
        self._largest.ratio = self.ratio
        if self.num_backwards < self.warmup_steps:
            stage = len(WARM_UP_RATIOS) * self.num_backwards // self.warmup_steps
            self._largest.ratio = max(self.ratio, WARM_UP_RATIOS[stage])
        self.num_backwards += 1
        super().begin_backward()

    def all_reduce(
        self, flat: Tensor, comm: Communicator, *, lost: Tensor | None = None, name: str = ""
    ) -> Work:
        self._clip(flat, comm.world_size)
        if not self.momentum:
            return super().all_reduce(flat, comm, name=name)
        velocity, keep_unused = self._velocity[flat], self._velocity.keep_unused(flat)
        new = torch.add(flat, velocity, alpha=self.momentum)
        flat.copy_(new)

        def arrived() -> None:
            places = self._largest.sent.pop(flat, None)
            if places is not None and comm.is_nested:
                new.masked_fill_(flat != 0, 0.0)
            elif places is not None:  # else it travelled whole
                new.index_fill_(0, places, 0.0)
            keep_if_finite(flat, [(velocity, new)])

        return ChainedWork(super().all_reduce(flat, comm, name=name), arrived, keep_unused)

    def state_dict(self, comm: Communicator) -> dict[str, Any]:
        state = super().state_dict(comm)
        return state | {
            "num_backwards": self.num_backwards,
            "velocity": self._velocity.state(comm, "velocity"),
        }

    def load_state_dict(self, state: dict[str, Any], rank: int, world_size: int) -> str | None:
        if state:
            self.num_backwards = state["num_backwards"]
            self._velocity.load(state["velocity"], rank, world_size)
        return super().load_state_dict(state, rank, world_size)

    def _clip(self, flat: Tensor, world_size: int) -> None:
        if self.clip_norm is None:
            return
        gradients = self._velocity.layout(flat).views
        limit = self.clip_norm / world_size**0.5
        norms = torch._foreach_norm(gradients)
        torch._foreach_mul_(gradients, [(limit / norm).clamp(max=1.0) for norm in norms])
