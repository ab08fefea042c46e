"""DiLoCo: local steps, and an outer optimizer for what a round has changed.

Sources: Douillard et al., "DiLoCo: distributed low-communication training of language models"
    (2023), arXiv:2311.08105,
algorithm 1, with its outer optimizer, SGD with Nesterov momentum; Douillard et al., "Streaming
DiLoCo with overlapping communication: towards a distributed free lunch" (2025), arXiv:2501.18512,
algorithm 2 (fragments, overlap, few bits).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_ring.algorithms.local.averages import start_averages
from lightning_ring.algorithms.local.local_sgd import LocalSGD
from lightning_ring.algorithms.own_pace import check_same_parameters
from lightning_ring.comm.communicator import Communicator, Work, advance
from lightning_ring.errors import ConfigurationError, check_arguments
from lightning_ring.gradients.compression import Compressor, Int8
from lightning_ring.gradients.compression.int8 import FourBit

_COMPRESSORS: dict[int, type[Compressor] | None] = {32: None, 8: Int8, 4: FourBit}


@dataclass(slots=True)
class _OuterGradient:
    """Of a fragment: this rank's change, which the works replace by the average over the ranks."""

    params: list[Parameter]
    change: list[Tensor]
    works: list[Work]

    def wait(self) -> None:
        while self.works:
            self.works.pop(0).wait()


class DiLoCo(LocalSGD):
    """After each round of ``every`` steps, from the parameters θ at its begin to w_r on rank r::

        Δ = mean of all θ - w      the outer gradient
        v ← outer_momentum · v + Δ
        θ ← θ - outer_lr · (Δ + outer_momentum · v)      on all ranks
        w_r ← own_share · w_r + (1 - own_share) · θ

    The inner optimizer's state stays with its rank. Evaluations and checkpoints within a round see
    the mean of all w.

    Args:
        every: Steps of a round; the papers take 100 to 500.
        outer_lr, outer_momentum: Of the outer optimizer.
        fragments: Streaming DiLoCo: the parameters in so many parts of about equal size, each with
            a round of its own. Part p = 1, 2, ... of P ends its rounds p · every / P steps after
            the others begin, so that the most that is on the wire at once is a P-th.
        overlap: Steps for which Δ travels while the ranks go on; θ and w change after them, and
            ``own_share`` is 0.5, else 0.
        outer_bits: Bits of a value of Δ on the wire: 32 (the parameters' dtype), 8 (as compression
            ``"int8"``) or 4 (`FourBit`). Ranks still sum in float32. Only float32 parameters are
            compressed.
        others: As of `LocalSGD`.

    Raises:
        ConfigurationError: An argument cannot work.
    """

    def __init__(
        self,
        every: int = 500,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        *,
        fragments: int = 1,
        overlap: int = 0,
        outer_bits: int = 32,
        **others: Any,
    ) -> None:
        super().__init__(every, **others)
        check_arguments(
            "DiLoCo",
            outer_lr > 0 and 0 <= outer_momentum < 1,
            "a learning rate above 0, and a momentum from 0 to below 1",
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
        )
        check_arguments(
            "DiLoCo",
            all(type(number) is int for number in (every, fragments, overlap))
            and 1 <= fragments <= every
            and 0 <= overlap < every,
            "from 1 to `every` fragments, and an overlap of fewer steps than `every`, a number "
            "of steps",
            every=every,
            fragments=fragments,
            overlap=overlap,
        )
        check_arguments(
            "DiLoCo",
            outer_bits in _COMPRESSORS,
            f"{', '.join(map(str, _COMPRESSORS))} bits",
            outer_bits=outer_bits,
        )
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum
        self.fragments = fragments
        self.overlap = overlap
        self.own_share = 0.5 if overlap else 0.0
        self.outer_bits = outer_bits
        compressor = _COMPRESSORS[outer_bits]
        self._compressor = compressor() if compressor is not None else None
        self._anchors: dict[Parameter, Tensor] = {}  # θ
        self._velocity: dict[Parameter, Tensor] = {}  # v
        # consecutive parameters are together
        self._fragment_of: dict[Parameter, int] = {}
        self._under_way: dict[int, _OuterGradient] = {}  # by fragment

    def attach(
        self, module: Any, optimizers: Any, comm: Communicator, *others: Any, **named: Any
    ) -> None:
        super().attach(module, optimizers, comm, *others, **named)
        self._under_way = {}
        if (found := len(self._parameters())) < self.fragments:
            raise ConfigurationError(
                f"DiLoCo got fragments={self.fragments}, and the module has {found} parameters to "
                "train, none of which is cut. Use fewer fragments."
            )
        self._begin_first_round()

    def detach(self, *, wait: bool = True) -> None:
        for gradient in self._under_way.values() if wait else ():
            gradient.wait()
        self._under_way = {}
        super().detach(wait=wait)

    # -- rounds

    def begin_batch(self, active_ranks: int | None = None) -> None:
        super().begin_batch(active_ranks)
        if self.num_steps > self.warmup_steps:
            check_same_parameters(self._trained(), [*self._anchors], "DiLoCo")
        elif set(self._trained()) != self._anchors.keys():
            self._begin_first_round()

    @property
    def steps_of_round(self) -> int:
        """From 1 to `every` where fragments end their rounds at different steps: ranks are never
        the same again.
        """
        if self.fragments == 1 and not self.overlap:
            return super().steps_of_round
        local = self.num_steps - self.warmup_steps
        return (local - 1) % self.every + 1 if local > 0 else 0

    def _after_local_step(self) -> None:
        step = self.num_steps - self.warmup_steps
        for index in range(self.fragments):
            since = step - (index + 1) * self.every // self.fragments
            if since < 0:
                continue
            if since % self.every == 0:
                self._send(index)
            # `None` after a checkpoint of another number of ranks
            gradient = self._under_way.get(index)
            if gradient is not None and since % self.every == self.overlap // 2:
                for work in gradient.works:
                    # the second leg of a compressed average travels in the other half of the
                    # overlap
                    advance(work)
            if gradient is not None and (since - self.overlap) % self.every == 0:
                self._receive(self._under_way.pop(index))
        if step % self.every == 0:
            self._end_round()

    def _average_parameters(self) -> None:
        """Nothing: fragments have been averaged by their outer gradients."""

    @torch.no_grad()
    def _send(self, index: int) -> None:
        params = self._members(index)
        change = torch._foreach_sub([self._anchors[param] for param in params], list(params))
        name = f"step {self.num_steps}: outer gradients of fragment {index}"
        works = start_averages(change, self._communicator, name, self._compressor)
        self._under_way[index] = _OuterGradient(params, list(change), works)

    @torch.no_grad()
    def _receive(self, gradient: _OuterGradient) -> None:
        gradient.wait()
        params: list[Tensor] = list(gradient.params)
        anchors, velocity = (
            [tensors[param] for param in gradient.params]
            for tensors in (self._anchors, self._velocity)
        )
        change = gradient.change
        torch._foreach_mul_(velocity, self.outer_momentum)
        torch._foreach_add_(velocity, change)
        torch._foreach_add_(change, velocity, alpha=self.outer_momentum)
        torch._foreach_add_(anchors, change, alpha=-self.outer_lr)
        if self.own_share:
            torch._foreach_lerp_(params, anchors, 1 - self.own_share)
        else:
            torch._foreach_copy_(params, anchors)

    def _begin_first_round(self) -> None:
        params = self._trained()
        self._anchors = {param: param.detach().clone() for param in params}
        self._velocity = {param: torch.zeros_like(param) for param in params}
        self._fragment_of = _in_fragments(params, self.fragments)

    def _members(self, index: int) -> list[Parameter]:
        return [param for param, own in self._fragment_of.items() if own == index]

    def _trained(self) -> list[Parameter]:
        return [param for param in self._module.parameters() if param.requires_grad]

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        names = {param: name for name, param in self._module.named_parameters()}
        outer: dict[str, Any] = {
            key: {names[param]: tensor.clone() for param, tensor in tensors.items()}
            for key, tensors in (("anchors", self._anchors), ("velocity", self._velocity))
        }
        outer["under_way"] = {}
        for index, gradient in self._under_way.items():
            gradient.wait()
            pairs = zip(gradient.params, gradient.change, strict=True)
            outer["under_way"][index] = {names[param]: change.clone() for param, change in pairs}
        return super().state_dict() | outer

    def load_state_dict(self, state: dict[str, Any]) -> str:
        self._begin_first_round()  # from the checkpoint's parameters, which are loaded by now
        params = dict(self._module.named_parameters())
        for key, tensors in (("anchors", self._anchors), ("velocity", self._velocity)):
            for name, saved in state.get(key, {}).items():
                if (param := params[name]) in tensors:
                    tensors[param].copy_(saved)
        problem = super().load_state_dict(state)
        self._under_way = {}
        # else another round begins, and what θ and w differ by travels with the next Δ
        if "under_way" in state and not problem:
            for index, changes in state["under_way"].items():
                members = self._members(index)
                if [*map(id, members)] == [id(params[name]) for name in changes]:
                    pairs = zip(members, changes.values(), strict=True)
                    change = [torch.empty_like(param).copy_(saved) for param, saved in pairs]
                    self._under_way[index] = _OuterGradient(members, change, [])
        return problem

    @property
    def _schedule(self) -> dict[str, int]:
        return super()._schedule | {"fragments": self.fragments, "overlap": self.overlap}

    def _exchange(self) -> str:
        parts = f" of each of {self.fragments} fragments" if self.fragments > 1 else ""
        later = f" {self.overlap} steps later" if self.overlap else ""
        return (
            f"an outer step{parts} (lr {self.outer_lr:g}, momentum {self.outer_momentum:g}, "
            f"{self.outer_bits} bits) follows{later}"
        )


def _in_fragments(params: Sequence[Parameter], count: int) -> dict[Parameter, int]:
    """The number of each parameter's fragment, of ``count`` of about equal size."""
    found: dict[Parameter, int] = {}
    total, before, index = sum(param.numel() for param in params), 0, 0
    for place, param in enumerate(params):
        is_full = (before + param.numel() / 2) * count >= (index + 1) * total
        # one for each fragment that is still empty
        are_few = len(params) - place < count - index
        if place and index < count - 1 and (is_full or are_few):
            index += 1
        found[param] = index
        before += param.numel()
    return found
