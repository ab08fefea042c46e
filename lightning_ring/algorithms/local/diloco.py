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
        # of each parameter; consecutive ones are together
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
        self._follow_module()

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
        # not one that was frozen for the whole round: its momentum would move it
        trained = set(self._parameters())
        members = (param for param, own in self._fragment_of.items() if own == index)
        params = [param for param in members if param in trained]
        if not params:
            return
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
        for param, anchor in zip(gradient.params, anchors, strict=True):
            if not param.requires_grad:  # frozen by now: the ranks agree on it
                param.copy_(anchor)
                self._apart.pop(param, None)

    def _begin_first_round(self) -> None:
        self._anchors, self._velocity, self._fragment_of = {}, {}, {}
        self._follow_module()

    def _follow_module(self) -> None:
        """Parameters that began to be trained have been the same on all ranks until now."""
        for param in self._parameters():
            if param not in self._anchors:
                self._anchors[param] = param.detach().clone()
                self._velocity[param] = torch.zeros_like(param)
        new = [param for param in self._parameters() if param not in self._fragment_of]
        if self._fragment_of:  # nothing that is in a fragment moves
            for param in new:
                sizes = [0] * self.fragments
                for other, own in self._fragment_of.items():
                    sizes[own] += other.numel()
                self._fragment_of[param] = sizes.index(min(sizes))
        else:
            self._fragment_of = _in_fragments(new, self.fragments)

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        names = {param: name for name, param in self._module.named_parameters()}
        outer: dict[str, Any] = {
            key: {names[param]: tensor.clone() for param, tensor in tensors.items()}
            for key, tensors in (("anchors", self._anchors), ("velocity", self._velocity))
        }
        outer["fragments"] = {names[param]: own for param, own in self._fragment_of.items()}
        outer["schedule"] = self._schedule
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
                tensors[params[name]] = torch.empty_like(params[name]).copy_(saved)
        problem = super().load_state_dict(state)
        self._under_way = {}
        # what θ and w differ by travels with the next Δ
        if state.get("schedule", self._schedule) != self._schedule:
            return problem or (
                "the checkpoint is of a DiLoCo with other every, fragments, overlap or "
                "warmup_steps: its outer gradients that were on the way are dropped, and rounds "
                "go on as they are set now."
            )
        # else another round begins
        if "under_way" in state and self.num_steps == state["num_steps"]:
            self._fragment_of = {params[name]: own for name, own in state["fragments"].items()}
            for index, changes in state["under_way"].items():
                those = [params[name] for name in changes]
                change = [
                    torch.empty_like(params[name]).copy_(saved) for name, saved in changes.items()
                ]
                self._under_way[index] = _OuterGradient(those, change, [])
        return problem

    @property
    def _schedule(self) -> list[int]:
        return [self.every, self.fragments, self.overlap, self.warmup_steps]

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
