"""Flat buckets: several parameters' gradients side by side in one buffer, so that they travel as one message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_ring.comm.cost import FIRST_BUCKET_MB, number_by_size
from lightning_ring.gradients.gradient_views import LentViews, are_held

_ALIGNMENT_BYTES = 64  # a cache line: views start where vector kernels like it
_MIB = 2**20

Empty = Callable[[int, torch.dtype, torch.device], Tensor]


def torch_empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class Layout:
    """A flat buffer and its parts: a view for each parameter's gradient, and the flags behind them."""

    flat: Tensor
    views: list[Tensor]
    used: Tensor
    stop: Tensor


class Bucket:
    """One flat buffer with a view for each parameter's gradient, and a tail of flags that travels with them.

    Layout of ``flat`` (1-D, the parameters' dtype and device)::

        gradient 0 | padding | gradient 1 | padding | ... | used flags (one per parameter) | stop flag

    Its length is divisible by ``num_shards``: shards of equal length travel across nodes without a padded copy.

    A flag is 0 or 1 before the reduction and positive after it where any rank had set it: whether any rank has a
    gradient for a parameter, and whether any rank was asked to stop, is known without a message of its own.

    Averages are handed out as views of ``flat``, without a copy, until somebody is found to keep one past the next
    backward. The old memory is then left to its holder, and from there on gradients are tensors of their own.

    Attributes:
        gradients: ``flat`` without its flags.
        flags: The flags, as the last elements of ``flat``.
        wire: What `fill` writes and what travels: ``flat`` itself, unless a compressor called `travel_as`.
        copies: Whether gradients are copies. It differs from rank to rank.
        pending: Parameters whose gradient this backward has yet to produce.
        launched: Whether the buffer has left in this backward.
        contributed: For each parameter whether this rank put a gradient into the buffer.
    """

    def __init__(
        self, names: Sequence[str], params: Sequence[Parameter], empty: Empty = torch_empty, num_shards: int = 1
    ) -> None:
        self.names = list(names)
        self.params = list(params)
        self.copies = False
        self._empty = empty
        self._num_shards = num_shards
        self._use(self._lay_out(self.params[0].dtype))
        self.wire = self._layout
        self._lent: LentViews | None = LentViews(self.flat, self.views)
        self._kept: dict[int, Tensor] = {}  # gradients that averages are copied into
        self.pending = 0
        self.launched = False
        self.contributed = [False] * len(self.params)

    @property
    def num_flags(self) -> int:
        """Elements at the end of ``flat`` that hold flags."""
        return len(self.params) + 1

    def travel_as(self, dtype: torch.dtype) -> None:
        """Have `fill` write gradients into a second buffer, of ``dtype``: converting them costs no pass of its own.

        Whoever asks for this brings the reduction back into ``flat``. Asking a second time changes nothing.
        """
        if self.wire is self._layout:
            self.wire = self._lay_out(dtype)

    def _use(self, layout: Layout) -> None:
        self._layout = layout
        self.flat, self.views, self.used, self.stop = layout.flat, layout.views, layout.used, layout.stop
        self.gradients, self.flags = self.flat.split([self.flat.numel() - self.num_flags, self.num_flags])

    def _lay_out(self, dtype: torch.dtype) -> Layout:
        _, end = _offsets(self.params)
        end += -(end + self.num_flags) % self._num_shards
        return self._cut(self._empty(end + self.num_flags, dtype, self.params[0].device).zero_())

    def _cut(self, flat: Tensor) -> Layout:
        offsets, _ = _offsets(self.params)
        end = flat.numel() - self.num_flags
        views = [_view_like(flat, offset, param) for offset, param in zip(offsets, self.params, strict=True)]
        flags = flat[end:].real if flat.is_complex() else flat[end:]
        return Layout(flat, views, flags[:-1], flags[-1:])

    def begin(self) -> bool:
        """Get ready for a backward; False if every parameter is frozen, so that nothing can come."""
        self.pending = sum(param.requires_grad for param in self.params)
        self.launched = False
        return self.pending > 0

    def fill(self, fresh: Sequence[bool], *, stop: bool) -> None:
        """Put every ``param.grad`` into ``wire``, zeros where there is none; those in ``fresh`` count as used.

        A gradient that already is a view of ``wire`` is not copied; the rest is copied in one multi-tensor call. A
        fresh one is dropped from ``param.grad``: should autograd accumulate into it again in the same backward, that
        late part is then seen separately instead of racing with the reduction under way.
        """
        grads: dict[int, Tensor] = {}  # those that are not in place
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
            elif is_view:  # an average of an earlier backward: it counts if some rank adds to it, else it must stay
                param.grad = grad.clone()
        grad = None
        self._leave_what_is_held(in_place)
        self._keep(grads)
        targets = self.wire.views
        if self.wire is not self._layout:
            grads |= {index: self.views[index] for index in in_place}
        if grads:
            dense = [grad.to_dense() if grad.is_sparse else grad.detach() for grad in grads.values()]
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
        """Go on in other memory if somebody holds a gradient of an earlier backward; those ``in_place`` go along.

        Not in memory of `Communicator.empty`, which all ranks would have to ask for.
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
        """Averages are copied into those of ``grads`` that somebody else holds as well, or into all of them."""
        indices = [index for index in grads if self.copies or self.contributed[index]]
        held = are_held([grads[index] for index in indices]) if not self.copies else [True] * len(indices)
        self._kept.update((index, grads[index]) for index, is_held in zip(indices, held, strict=True) if is_held)

    def publish(self) -> list[Parameter]:
        """Make the reduced gradients the parameters' ``.grad``, and return those parameters.

        A gradient that no rank used is left as it was.
        """
        used = None if all(self.contributed) else self.used.tolist()  # waits for the device, only where flags matter
        published = []
        for index, param in enumerate(self.params):
            if self.contributed[index] or (used is not None and used[index] > 0 and param.requires_grad):
                lent = self._lent if index not in self._kept else None
                param.grad = lent.views[index] if lent is not None else self._copied(index)
                published.append(param)
        self._kept.clear()
        return published

    def _copied(self, index: int) -> Tensor:
        """As DistributedDataParallel does: into the gradient that was there, so that who holds it sees the average."""
        view, kept = self.views[index], self._kept.get(index)
        if kept is None or kept.is_sparse or kept.stride() != view.stride() or kept.dtype != view.dtype:
            return view.clone()
        kept.detach().copy_(view)
        return kept

    def describe(self) -> str:
        others = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        return f"{self.names[0]}{others}, {self.flat.numel() * self.flat.element_size() / _MIB:.3g} MiB"


def same_memory(tensor: Tensor, view: Tensor) -> bool:
    """Whether ``tensor`` is laid out as ``view``, in the same place."""
    return not tensor.is_sparse and tensor.data_ptr() == view.data_ptr() and tensor.stride() == view.stride()


def plan_buckets(
    named_params: Sequence[tuple[str, Parameter]],
    bucket_cap_mb: float,
    first_bucket_mb: float = FIRST_BUCKET_MB,
    empty: Empty = torch_empty,
    num_shards: int = 1,
) -> list[Bucket]:
    """Fill buckets with ``named_params`` in the order given (the reverse of use), one dtype and device to a bucket.

    Args:
        named_params: Each parameter once, in the order in which backward is expected to produce gradients.
        bucket_cap_mb: Size in MiB past which a bucket takes no further parameter (`number_by_size`).
        first_bucket_mb: The same for the first bucket of each dtype and device, smaller so that the wire starts early.
        empty: Where buffers get their memory, `Communicator.empty` for instance.
        num_shards: What each buffer's length is to be divisible by: the world size.
    """
    kinds = {(param.dtype, param.device) for _, param in named_params}
    groups: list[tuple[int, tuple[str, ...], tuple[Parameter, ...]]] = []
    for kind in kinds:
        members = [(i, n, p) for i, (n, p) in enumerate(named_params) if (p.dtype, p.device) == kind]
        numbered = number_by_size(
            [p.numel() * p.element_size() for _, _, p in members], bucket_cap_mb * _MIB, first_bucket_mb * _MIB
        )
        for _, group in groupby(zip(numbered, members, strict=True), key=lambda pair: pair[0]):
            last, names, params = zip(*(member for _, member in group), strict=True)
            groups.append((last[-1], names, params))
    # a bucket can leave once its last gradient is there: that position decides the one order of travel on every rank
    return [Bucket(names, params, empty, num_shards) for _, names, params in sorted(groups, key=lambda group: group[0])]


def _offsets(params: Sequence[Parameter]) -> tuple[list[int], int]:
    """Where each parameter starts, in elements, and where the last one ends; each start is aligned."""
    step = max(1, _ALIGNMENT_BYTES // params[0].element_size())
    offsets, end = [], 0
    for param in params:
        offsets.append(end)
        end += -(-param.numel() // step) * step
    return offsets, end


def _view_like(flat: Tensor, offset: int, param: Parameter) -> Tensor:
    """View into ``flat`` with ``param``'s shape, and its strides (say, channels-last) where those are dense."""
    strides = torch.empty_like(param, device="meta").stride()
    return flat.as_strided(param.size(), strides, flat.storage_offset() + offset)
