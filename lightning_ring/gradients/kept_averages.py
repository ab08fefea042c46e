"""Sharded averages of an earlier backward that the next backward adds to, or leaves alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_ring.errors import RingError
from lightning_ring.gradients.bucket import same_memory
from lightning_ring.gradients.shards import GradientShards


@dataclass(slots=True)
class _Sum:
    """A gradient that is the sum of an average and later gradients."""

    average: Tensor | None  # this rank's part of it; `None` where other code has changed the gradient since
    address: int = 0  # of the gradient, before backward adds to it
    version: int = -1  # of the gradient: before backward adds to it, then after it


class KeptAverages:
    """Averages that stay in ``param.grad`` after a step, because ``zero_grad`` did not drop them.

    Such an average is valid in this rank's part and NaN elsewhere. A backward that has no gradient for the parameter
    leaves it alone: the part is set aside, and added to the bucket after the reduction. A backward that adds to the
    average gets zeros in the NaN's place. The mean of these sums contains 1/N of the average, because each rank has its
    own part only; the missing (N-1)/N are added after the reduction.

    Args:
        names: Name of each parameter, for errors.
    """

    def __init__(self, shards: GradientShards, names: Mapping[Parameter, str]) -> None:
        self._shards = shards
        self._names = names
        self._published: dict[Parameter, Tensor | None] = {}  # the tensor, where ``.grad`` is not a view of the bucket
        self._set_aside: dict[Parameter, Tensor] = {}  # this rank's parts of averages that this backward leaves alone
        self._before_sum: dict[Parameter, _Sum] = {}  # gradients that backward is about to add to
        self._sums: dict[Parameter, _Sum] = {}
        self._began_as_none: set[Parameter] = set()  # ``.grad`` in this backward; an average may be put back later

    def __len__(self) -> int:
        """Number of gradients that contain an average of an earlier backward."""
        return len(self._sums) + len(self._set_aside)

    def published(self, param: Parameter, *, settled: bool) -> None:
        """``param.grad`` is an average now; of this rank's part alone, if the layout is ``settled``."""
        self._began_as_none.discard(param)
        if settled:
            self._published[param] = None if self._shards.is_view(param) else param.grad

    def before_gradient(self, param: Parameter) -> None:
        """Backward, or `torch.autograd.grad`, has a gradient of ``param``; only backward adds it to ``param.grad``."""
        grad = param.grad
        if self._before_sum:
            self._before_sum.pop(param, None)
        if grad is None:
            if self._sums:
                self._sums.pop(param, None)
            self._began_as_none.add(param)
        elif self._is_average(param):
            average = self._shards.zero_other_parts(param)
            self._before_sum[param] = _Sum(average, grad.data_ptr(), grad._version)
        elif (param in self._published and param not in self._began_as_none) or (
            param in self._sums and self._sums[param].version != grad._version
        ):
            if self._shards.comm.read(grad.any()):
                self._before_sum[param] = _Sum(None)
            else:
                self._forget(param)

    def after_gradient(self, param: Parameter, *, reduced: bool) -> None:
        """Backward has added to ``param.grad``. ``reduced``: the sum will be averaged, so that its average must be
        known."""
        if not (self._before_sum or self._sums):
            return
        grad = param.grad
        if param in self._before_sum:
            self._published.pop(param, None)
            self._sums[param] = before = self._before_sum.pop(param)
            # one addition in place, and no change by a user's hook since
            if grad is None or (grad.data_ptr(), grad._version) != (before.address, before.version + 1):
                before.average = None
        if param in self._sums and grad is not None:
            self._sums[param].version = grad._version
            if reduced:
                self._check(param)

    def before_sending(self, param: Parameter, *, unreduced: bool) -> None:
        """The current backward has no gradient of ``param``. ``unreduced``: its ``.grad`` has to be averaged."""
        grad = param.grad
        if grad is None:
            self._forget(param)
        elif self._is_average(param):
            own = self._shards.of_gradient(param)
            assert own is not None
            self._set_aside[param] = own.clone()
            param.grad = own = None
        elif param in self._sums and unreduced:
            if self._sums[param].version != grad._version:
                self._sums[param].average = None
            if self._sums[param].average is None and not self._shards.comm.read(grad.any()):
                self._forget(param)
            else:
                self._check(param)

    def abandon(self) -> None:
        """The current backward has raised."""
        self._set_aside.clear()

    def add_to_buckets(self, active_ranks: int) -> None:
        """After the reduction: complete the averages in the buckets' shards."""
        set_aside, self._set_aside = self._set_aside, {}
        for param, part in set_aside.items():
            bucket, start, stop = self._shards.bounds(param)
            bucket.flat[start:stop].add_(part)
            bucket.contributed[self._shards.slot(param)[1]] = True
        for param, total in list(self._sums.items()):
            bucket, start, stop = self._shards.bounds(param)
            contributed = bucket.contributed[self._shards.slot(param)[1]]
            if bucket.launched and contributed and total.average is not None:
                del self._sums[param]
                bucket.flat[start:stop].add_(total.average, alpha=(active_ranks - 1) / active_ranks)

    # -- all ranks keep averages, or none

    def count(self) -> Tensor:
        """Whether this rank keeps averages, the last digit of their number, and its square. Summed over ranks."""
        digit = len(self) % 16  # small: sums over many ranks are exact in float32
        return torch.tensor([len(self) > 0, digit, digit * digit], dtype=torch.float32)

    def check_counts(self, totals: Tensor, world_size: int) -> None:
        """Raise `RingError` if ``totals``, the sum of all ranks' `count`, shows that they keep different numbers."""
        keeping, total, squares = totals.tolist()
        if keeping not in (0, world_size) or total * total != squares * world_size:  # digits are equal iff these are
            raise RingError(
                f"{keeping:g} of {world_size} ranks keep averages of an earlier backward, or different numbers of "
                "them: some ranks have dropped theirs (zero_grad). Under strategy='ring_sharded' each rank has only "
                "its shard of an average, so that the sum with this backward is unknown. Drop gradients on all ranks, "
                "or on none."
            )

    def _is_average(self, param: Parameter) -> bool:
        """Whether ``param.grad`` is the tensor that was published: valid in this rank's part, NaN elsewhere."""
        if param not in self._published or param.grad is None:
            return False
        tensor = self._published[param]
        return same_memory(param.grad, self._shards.view(param) if tensor is None else tensor)

    def _check(self, param: Parameter) -> None:
        if self._sums[param].average is None:
            raise RingError(
                f"a backward adds to the gradient of {self._names[param]}: an average that a backward has added to, "
                "and that other code has changed in place or replaced. Under strategy='ring_sharded' each rank has "
                "only its shard of an average, so that the sum is unknown. Call zero_grad() before this backward, or "
                "take gradients that are not for the optimizer with torch.autograd.grad(...)."
            )

    def _forget(self, param: Parameter) -> None:
        for known in (self._published, self._before_sum, self._sums, self._set_aside):
            known.pop(param, None)
