"""Averages of which each rank keeps its shard: the first half of an all-reduce, for a sharded optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_ring.comm.communicator import ChainedWork, ReduceOp, Work, shard_bounds
from lightning_ring.errors import RingError
from lightning_ring.gradients.bucket import Bucket, same_memory
from lightning_ring.gradients.reducer import Reducer
from lightning_ring.gradients.sending import scatter_compressed_


class ShardReducer(Reducer):
    """A `Reducer` that scatters: ``param.grad`` holds averages in this rank's shard of each bucket, and only there.

    The shard of a bucket is `shard_bounds` of ``bucket.flat`` for ``comm.shard_index``; the rest of a gradient is NaN,
    so that code which reads it cannot take it for a value. The first backward still reduces to all ranks, because
    buckets are filled anew after it, in the order in which its gradients came; from then on they stay as they are, so
    that optimizer state can be cut along them. (With ``auto`` the first few do, until sizes are chosen.)

    Which parameters some rank used, and whether some rank was asked to stop, travels once a backward, behind the last
    bucket: of a bucket's own flags only one rank would see the sum.

    A backward that adds to an average has this rank's part of it once, in its shard, and no rank the others': the rest
    of that gradient is set to zero first. What is missing from a mean of such sums is added afterwards.

    Attributes:
        settled: Whether buckets have their last layout.
        on_gradient: Called with each parameter that gets a gradient, before it does, if set.
    """

    gathers_sparse = False  # buckets, which optimizer state is cut along, hold all parameters

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.settled = False
        self.on_gradient: Callable[[Parameter], None] | None = None
        # parameters whose ``.grad`` is an average, and valid in this rank's part; the tensor, where it is a copy
        self._averages: dict[Parameter, Tensor | None] = {}
        self._aside: dict[Parameter, Tensor] = {}  # this rank's part of averages that this backward leaves alone
        self._coming: dict[Parameter, _Sum] = {}  # gradients that backward is about to add to, as they are then
        self._sums: dict[Parameter, _Sum] = {}
        self._whole: set[Parameter] = set()  # ``.grad`` was `None` when backward came; an average may be put back later
        super().__init__(*args, **kwargs)

    def track(self, named_parameters: Iterable[tuple[str, Parameter]]) -> list[Parameter]:
        new = super().track(named_parameters)
        for param in new:
            self._hooks.append(param.register_hook(partial(self._before_gradient, param)))
        return new

    def finish(self) -> None:
        if not self._active:
            return
        super().finish()
        self.settle()

    def settle(self) -> None:
        """Give buckets their last layout, if they do not have it yet. Collective."""
        if not self.settled:
            self._revise_layout()
            self.settled = self._layout.settle()

    def part_of(self, param: Parameter) -> tuple[Bucket, int, int]:
        """Where this rank's part of ``param`` lies in its bucket's ``flat``: from, and up to; they may be equal."""
        bucket, index = self._slots[param]
        first, last = shard_bounds(bucket.flat.numel(), self._comm.world_size, self._comm.shard_index)
        offset = int(bucket.views[index].storage_offset() - bucket.flat.storage_offset())
        start = min(max(first, offset), offset + param.numel())
        return bucket, start, max(start, min(last, offset + param.numel()))

    def own_part(self, param: Parameter) -> Tensor | None:
        """This rank's part of ``param.grad`` in the order of memory, 1-D, to be changed in place."""
        grad = param.grad
        if grad is None:
            return None
        bucket, start, stop = self.part_of(param)
        view = bucket.views[self._slots[param][1]]
        if grad.is_sparse or grad.stride() != view.stride():  # put there by the user
            param.grad = grad = torch.empty_like(view).copy_(grad.to_dense() if grad.is_sparse else grad)
        first = start - int(view.storage_offset() - bucket.flat.storage_offset())
        grad = grad.detach() if grad.requires_grad else grad
        return grad.as_strided((stop - start,), (1,), int(grad.storage_offset()) + first)

    def _send(self, bucket: Bucket, name: str) -> Work:
        if not self.settled:
            return super()._send(bucket, name)
        ranks, comm, flat = self.active_ranks, self._comm, bucket.flat
        if self._compressor is not None and self._compressor.accepts(flat.dtype):
            return scatter_compressed_(bucket, self._compressor, comm, ranks, name)
        if ranks is None:
            return comm.reduce_scatter_(flat, op=ReduceOp.AVG, name=name)
        return ChainedWork(comm.reduce_scatter_(flat, op=ReduceOp.SUM, name=name), lambda: flat.div_(ranks))

    def _launch(self) -> None:
        bucket = self._queue[self._next]
        for param in bucket.params:
            if param not in self._ready:
                self._before_leaving(param)
        super()._launch()
        if self.settled and self._next == len(self._queue):
            self._works.append((bucket, self._send_flags()))

    def _send_flags(self) -> Work:
        flags = [part for bucket in self._queue for part in (bucket.wire.used, bucket.wire.stop)]
        targets = [part for bucket in self._queue for part in (bucket.used, bucket.stop)]
        device = self._queue[0].flat.device
        num_kept = len(self._sums) + len(self._aside)  # gradients that hold an average of an earlier backward
        digit = num_kept % 16  # small: sums over many ranks are exact in float32
        counted = torch.tensor([num_kept > 0, digit, digit * digit], dtype=torch.float32)
        vector = torch.cat([part.to(device, torch.float32) for part in (*flags, counted)])
        *parts, totals = vector.split([part.numel() for part in (*flags, counted)])

        def arrived() -> None:
            torch._foreach_copy_(targets, list(parts))
            if num_kept or totals.device.type == "cpu":  # reading it makes the host wait for a GPU
                self._check_all_keep(totals)

        return ChainedWork(self._comm.all_reduce_(vector, name=self._named("flags")), arrived)

    # -- averages that a backward adds to, or leaves alone

    def _check_all_keep(self, totals: Tensor) -> None:
        """``totals``: number of ranks that keep averages, sum of the last digits of how many, sum of their squares."""
        keeping, total, squares = totals.tolist()
        size = self._comm.world_size
        if keeping not in (0, size) or total * total != squares * size:  # digits are equal if and only if these are
            raise RingError(
                f"{keeping:g} of {size} ranks keep averages of an earlier backward, or not equally many: some have "
                "dropped theirs (zero_grad). Under strategy='ring_sharded' each rank has its shard of an average "
                "only, so that the sum with this backward cannot be told. Drop gradients on all ranks, or on none."
            )

    def _before_gradient(self, param: Parameter, _: Tensor) -> None:
        """Called for each gradient, those of `torch.autograd.grad` too, which leaves ``param.grad`` as it is."""
        if self._discarding:
            return
        if self.on_gradient is not None:
            self.on_gradient(param)
        grad = param.grad
        self._coming.pop(param, None)
        if grad is None:
            self._sums.pop(param, None)
            self._whole.add(param)
        elif self._holds_average(param):
            average = self._zero_other_parts(param)
            self._coming[param] = _Sum(average, grad.data_ptr(), grad._version)
        elif (param in self._averages and param not in self._whole) or (
            param in self._sums and self._sums[param].version != grad._version
        ):
            if grad.any():
                self._coming[param] = _Sum(None)
            else:
                self._forget(param)

    def _take_gradient(self, param: Parameter) -> None:
        if not self._discarding:
            self._note_sum(param)
        super()._take_gradient(param)

    def _note_sum(self, param: Parameter) -> None:
        grad = param.grad
        if param in self._coming:
            self._averages.pop(param, None)
            self._sums[param] = before = self._coming.pop(param)
            # one addition in place, and nothing that a hook of the user has done to the sum since
            if grad is None or (grad.data_ptr(), grad._version) != (before.address, before.version + 1):
                before.average = None
        if param in self._sums and param.grad is not None:
            self._sums[param].version = param.grad._version
            if self._reduces and self.enabled:
                self._check_sum(param)

    def _before_leaving(self, param: Parameter) -> None:
        """This backward has no gradient for ``param``."""
        grad = param.grad
        if grad is None:
            self._forget(param)
        elif self._holds_average(param):
            own = self.own_part(param)
            assert own is not None
            self._aside[param] = own.clone()
            param.grad = own = None
        elif param in self._sums and self._is_fresh(param):
            if self._sums[param].version != grad._version:
                self._sums[param].average = None
            if self._sums[param].average is None and not grad.any():
                self._forget(param)
            else:
                self._check_sum(param)

    def _complete_averages(self) -> None:
        aside, self._aside = self._aside, {}
        for param, part in aside.items():
            bucket, start, stop = self.part_of(param)
            bucket.flat[start:stop].add_(part)
            bucket.contributed[self._slots[param][1]] = True
        ranks = self.active_ranks or self._comm.world_size
        for param, total in list(self._sums.items()):
            bucket, start, stop = self.part_of(param)
            if bucket.launched and bucket.contributed[self._slots[param][1]] and total.average is not None:
                del self._sums[param]
                bucket.flat[start:stop].add_(total.average, alpha=(ranks - 1) / ranks)

    def _publish(self, bucket: Bucket) -> None:
        if self.settled:
            self._mark_other_parts(bucket)
        for param in bucket.publish():
            self._whole.discard(param)
            if self.settled:
                assert param.grad is not None
                is_view = same_memory(param.grad, bucket.views[self._slots[param][1]])
                self._averages[param] = None if is_view else param.grad

    def _mark_other_parts(self, bucket: Bucket) -> None:
        """Set what reduce-scatter left outside this rank's shard to NaN: it is no gradient of anything."""
        flat = bucket.flat
        first, last = shard_bounds(flat.numel(), self._comm.world_size, self._comm.shard_index)
        end = flat.numel() - bucket.num_flags
        flat[: min(first, end)].fill_(math.nan)
        flat[last:end].fill_(math.nan)

    def _holds_average(self, param: Parameter) -> bool:
        """Whether ``param.grad`` is what was published: valid in this rank's part, NaN elsewhere."""
        if param not in self._averages or param.grad is None:
            return False
        published = self._averages[param]
        bucket, index = self._slots[param]
        return same_memory(param.grad, bucket.views[index] if published is None else published)

    def _zero_other_parts(self, param: Parameter) -> Tensor:
        """Set ``param.grad`` to zero outside this rank's part, and return a copy of that part."""
        own, grad = self.own_part(param), param.grad
        assert own is not None
        assert grad is not None
        whole = grad.detach().as_strided((grad.numel(),), (1,), int(grad.storage_offset()))
        first = int(own.storage_offset() - grad.storage_offset())
        whole[:first].zero_()
        whole[first + own.numel() :].zero_()
        return own.clone()

    def _check_sum(self, param: Parameter) -> None:
        if self._sums[param].average is None:
            raise RingError(
                f"a backward adds to the gradient of {self._names[param]}, which is an average that was then added to, "
                "and changed in place or replaced. Under strategy='ring_sharded' each rank has its shard of an average "
                "only, so that the sum cannot be told. Call zero_grad() before this backward, or take gradients that "
                "are not for the optimizer with torch.autograd.grad(...)."
            )

    def _forget(self, param: Parameter) -> None:
        for known in (self._averages, self._coming, self._sums, self._aside):
            known.pop(param, None)


@dataclass(slots=True)
class _Sum:
    """A gradient that is an average and what backward added to it.

    Attributes:
        average: This rank's part of the average; `None` where other code has changed the gradient since.
        address: Of the gradient, before backward adds to it.
        version: Of the gradient: before backward adds to it, then after it.
    """

    average: Tensor | None
    address: int = 0
    version: int = -1
