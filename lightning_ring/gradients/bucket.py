"""Flat buckets: the gradients of several parameters in one buffer, sent as one message.

Gradients are views in a storage of their own over the bucket's memory (through DLPack), so that the
communicator's aliases do not count. Before a bucket is written again, its references (tensors, weak
references, storage) are compared with those of an unused bucket. If user code, an optimizer's
state, autograd or a NumPy array holds a gradient, the bucket goes on in other memory and hands out
copies, as DDP does by default.

Every bucket ends with flags that are reduced with it: the parameters that *some* rank used (one
that no rank used keeps its ``.grad``, ``None`` included), and a request to stop.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import compress, groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_ring.comm.cost import FIRST_BUCKET_MB, number_by_size
from lightning_ring.gradients.memory import Fillers, LentViews, are_held, make_unreadable

_ALIGNMENT_BYTES = 64  # a cache line: vector kernels are fast on aligned views
_SHARD_ELEMENTS = 32  # 64 bytes of a 16-bit type, in which a bucket may travel, and 128 of float32
_MIB = 2**20

Named = Sequence[tuple[str, Parameter]]


class BucketMemory(NamedTuple):
    """A flat buffer, a view of it for each parameter's gradient, and the flags at its end."""

    flat: Tensor
    views: list[Tensor]
    used: Tensor
    stop: Tensor


class Bucket:
    """One flat buffer with a view for each parameter's gradient, and flags at the end.

    Layout of ``flat`` (1-D, the parameters' dtype and device)::

        gradient 0 | padding | gradient 1 | padding | ... | used flags (one each) | stop flag

    Its length is divisible by ``num_shards``, so that shards travel without a padded copy, and each
    of several shards begins at a multiple of 64 bytes: elsewhere NCCL and the optimizers' kernels
    leave their 16-byte paths.

    A flag is 0 or 1 before the reduction, and positive after it if any rank had set it. The flags
    tell whether any rank has a gradient of a parameter, and whether any rank was asked to stop,
    without a message of their own.

    ``param.grad`` is a view of ``flat``, without a copy, until other code keeps a gradient past the
    next backward. The bucket then moves to new memory, and gradients are separate tensors from then
    on.

    Attributes:
        num_flags: Elements at the end of ``flat`` that hold flags.
        gradients: ``flat`` without its flags.
        flags: The flags, as the last elements of ``flat``.
        wire: What `fill` writes and what travels: ``flat`` itself, unless a compressor called
            `travel_as`.
        copies: Whether gradients are copies. It differs from rank to rank.
        produced: For each parameter, whether this backward has produced its gradient.
        pending: Number of parameters whose gradient this backward has yet to produce.
        launched: Whether this backward has sent the buffer.
        contributed: For each parameter, whether this rank put a gradient into the buffer.
        fillers: The streams that computed its gradients.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[Parameter],
        empty: Callable[..., Tensor] = torch.empty,
        num_shards: int = 1,
    ) -> None:
        self.names = list(names)
        self.params = list(params)
        self.copies = False
        self._empty = empty
        self._offsets, end = _offsets(params)
        self.num_flags = len(params) + 1
        unit = num_shards * _SHARD_ELEMENTS if num_shards > 1 else 1
        self._numel = end + self.num_flags
        self._numel += -self._numel % unit
        self._use(self._lay_out(params[0].dtype))
        self.wire = self._layout
        self._lent: LentViews | None = LentViews(self.flat, self.views)
        self._kept: dict[int, Tensor] = {}  # gradients that averages are copied into
        self.begin()
        self.contributed = [False] * len(self.params)
        self.fillers = Fillers(self.flat.device)

    def travel_as(self, dtype: torch.dtype) -> None:
        """Have `fill` write gradients into a second buffer, of ``dtype``, so that conversion needs
        no extra pass.

        The caller brings the reduction back into ``flat``. A second call changes nothing.
        """
        if self.wire is self._layout:
            self.wire = self._lay_out(dtype)

    def _use(self, layout: BucketMemory) -> None:
        self._layout = layout
        self.flat, self.views, self.used, self.stop = layout
        sizes = [self._numel - self.num_flags, self.num_flags]
        self.gradients, self.flags = self.flat.split(sizes)

    def _lay_out(self, dtype: torch.dtype) -> BucketMemory:
        device = self.params[0].device
        return self._cut(self._empty(self._numel, dtype=dtype, device=device).zero_())

    def _cut(self, flat: Tensor) -> BucketMemory:
        views = [
            _view_like(flat, offset, param)
            for offset, param in zip(self._offsets, self.params, strict=True)
        ]
        flags = flat[-self.num_flags :]
        flags = flags.real if flat.is_complex() else flags
        return BucketMemory(flat, views, flags[:-1], flags[-1:])

    def begin(self) -> bool:
        """Prepare for a backward. Returns False if every parameter is frozen."""
        self.produced = [False] * len(self.params)
        self.pending = sum(param.requires_grad for param in self.params)
        self.launched = False
        self._kept.clear()  # of a backward that raised
        return self.pending > 0

    def fill(self, fresh: Sequence[bool], *, stop: bool) -> None:
        """Copy every ``param.grad`` into ``wire``, or zeros if it is `None`. ``fresh`` gradients
        count as used.

        Gradients that are views of ``wire`` need no copy; one multi-tensor call copies the others.
        Fresh gradients are dropped from ``param.grad``: a further part from the same backward then
        accumulates outside the buffer, which the reduction uses.
        """
        self.fillers.join(param.grad for param in self.params)
        grads: dict[int, Tensor] = {}  # not views of `flat`
        in_place, absent = [], []
        for index, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            grad = param.grad
            self.contributed[index] = fresh[index] and grad is not None
            if grad is None:
                absent.append(index)
                continue
            is_view = same_memory(grad, view)
            if is_view:
                in_place.append(index)
            else:
                grads[index] = grad
            if self.contributed[index]:
                param.grad = None
            elif is_view:  # an average of an earlier backward: kept unless some rank adds to it
                param.grad = grad.clone()
        grad = None
        self._leave_what_is_held(in_place)
        self._keep(grads)
        targets = self.wire.views
        if self.wire is not self._layout:
            grads |= {index: self.views[index] for index in in_place}
        if grads:
            dense = [
                grad.to_dense() if grad.is_sparse else grad.detach() for grad in grads.values()
            ]
            torch._foreach_copy_([targets[index] for index in grads], dense)
        if absent:
            torch._foreach_zero_([targets[index] for index in absent])
        self.wire.used.fill_(1)
        if not all(self.contributed):  # a list sent to a GPU would make the host wait for it
            flags = zip(self.wire.used.split(1), self.contributed, strict=True)
            torch._foreach_zero_([flag for flag, contributed in flags if not contributed])
        self.wire.stop.fill_(stop)
        self.launched = True

    def _leave_what_is_held(self, in_place: Sequence[int]) -> None:
        """Move to new memory if other code holds a gradient of an earlier backward. Copies
        ``in_place`` gradients too.

        The new memory is not from `Communicator.empty`, which is collective.
        """
        if self._lent is None or not self._lent.are_held():
            return
        lent, self._lent, self.copies = self._lent, None, True
        self._kept = {index: lent.views[index] for index in in_place}
        moves_wire = self.wire is self._layout
        self._use(self._cut(self.flat.clone()))
        if moves_wire:
            self.wire = self._layout

    def _keep(self, grads: dict[int, Tensor]) -> None:
        """Note ``grads`` that other code holds, or all after a move: averages are copied into
        them.
        """
        if not self.copies:
            own = [index for index in grads if self.contributed[index]]
            held = compress(own, are_held([grads[index] for index in own]))
            grads = {index: grads[index] for index in held}
        self._kept.update(grads)

    def publish(self, read: Callable[[Tensor], Tensor]) -> list[Parameter]:
        """Set ``.grad`` of each used parameter to the reduced gradient, and return these
        parameters.

        A parameter that no rank used keeps its ``.grad``. ``read`` brings a tensor to the host
        (`Communicator.read`).
        """
        published = self._used_params(read)
        for index, param in published.items():
            lent = self._lent if index not in self._kept else None
            param.grad = lent.views[index] if lent is not None else self._copied(index)
        self._kept.clear()
        return list(published.values())

    def withdraw(self, read: Callable[[Tensor], Tensor]) -> set[Parameter]:
        """Instead of `publish`: return these parameters. Gradients that other code holds can no
        longer be read.
        """
        used = self._used_params(read)
        for index in self._kept.keys() & used.keys():
            if self._kept[index].is_sparse:  # which has no memory of its own to be made unreadable
                continue
            make_unreadable(
                self._kept[index],
                f"a tensor was read that was {self.names[index]}.grad before a backward averaged "
                "it. Under strategy='ring_sharded' it cannot hold the average, as it does with "
                "strategy='ring'. Read it, or copy it, before that backward.",
            )
        self._kept.clear()
        return set(used.values())

    def lend(self, start: int, stop: int) -> Tensor:
        """Elements of ``flat``, as memory that other code may hold: a view, or where such code
        was found a copy.
        """
        if self._lent is not None:
            return self._lent.part(start, stop)
        return self.flat[start:stop].clone()

    def _used_params(self, read: Callable[[Tensor], Tensor]) -> dict[int, Parameter]:
        """Those to get the reduced gradient, by index."""
        own = self.contributed
        others = zip(self.params, own, strict=True)
        if any(param.requires_grad and not mine for param, mine in others):
            used = read(self.used).tolist()  # it waits for the device: only if needed
        else:
            used = own
        return {
            index: param
            for index, param in enumerate(self.params)
            if own[index] or (used[index] > 0 and param.requires_grad)
        }

    @property
    def lent_params(self) -> list[Parameter]:
        """The parameters whose ``.grad`` is a view of ``flat``."""
        views = self._lent.views if self._lent is not None else []
        return [
            param for param, view in zip(self.params, views, strict=False) if param.grad is view
        ]

    def take_over(self, index: int) -> None:
        """Move a ``.grad`` that is a view of an earlier bucket into this one, so that the
        other's memory is free.
        """
        assert self._lent is not None
        param, view = self.params[index], self._lent.views[index]
        assert param.grad is not None
        param.grad = view.copy_(param.grad)

    def _copied(self, index: int) -> Tensor:
        """As DistributedDataParallel: the average is copied into the kept gradient, for its
        holder to see.
        """
        view, kept = self.views[index], self._kept.get(index)
        if (
            kept is None
            or kept.is_sparse
            or kept.stride() != view.stride()
            or kept.dtype != view.dtype
        ):
            return view.clone()
        kept.detach().copy_(view)
        return kept

    def describe(self) -> str:
        others = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        return (
            f"{self.names[0]}{others}, {self.flat.numel() * self.flat.element_size() / _MIB:.3g} "
            "MiB"
        )


def same_memory(tensor: Tensor, view: Tensor) -> bool:
    """Whether ``tensor`` has the address and the strides of ``view``."""
    return (
        not tensor.is_sparse
        and tensor.data_ptr() == view.data_ptr()
        and tensor.stride() == view.stride()
    )


def plan_buckets(named_params: Named, bucket_cap_mb: float) -> list[Named]:
    """Cut ``named_params``, in the given order (the reverse of use), into the members of buckets:
    one dtype and device per bucket.

    ``bucket_cap_mb`` is the size in MiB past which a bucket takes no further parameter
    (`number_by_size`); the first bucket of each dtype and device is smaller, so that the wire
    starts early.
    """
    position = {param: index for index, (_, param) in enumerate(named_params)}
    kinds = defaultdict[Any, list[tuple[str, Parameter]]](list)
    for name, param in named_params:
        kinds[param.dtype, param.device].append((name, param))
    groups: list[Named] = []
    for members in kinds.values():
        sizes = [param.nbytes for _, param in members]
        numbers = number_by_size(sizes, bucket_cap_mb * _MIB, FIRST_BUCKET_MB * _MIB)
        pairs = groupby(zip(numbers, members, strict=True), key=itemgetter(0))
        groups += [[member for _, member in group] for _, group in pairs]
    # A bucket is complete with its last gradient, whose position decides the order.
    return sorted(groups, key=lambda group: position[group[-1][1]])


def _offsets(params: Sequence[Parameter]) -> tuple[list[int], int]:
    """Aligned start of each parameter, and end of the last, in elements."""
    step = _ALIGNMENT_BYTES // params[0].element_size()
    offsets, end = [], 0
    for param in params:
        offsets.append(end)
        end += -(-param.numel() // step) * step
    return offsets, end


def _view_like(flat: Tensor, offset: int, param: Parameter) -> Tensor:
    """View of ``flat`` with the shape of ``param``, and its strides (such as channels-last) if
    they are dense.
    """
    strides = torch.empty_like(param, device="meta").stride()
    return flat.as_strided(param.size(), strides, flat.storage_offset() + offset)
