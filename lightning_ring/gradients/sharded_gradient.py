"""`ShardedGradient`: what ``param.grad`` is after a backward that leaves each rank its part of the
averages.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from lightning_ring.comm.communicator import Communicator, ReduceOp, shard_bounds
from lightning_ring.errors import RingError
from lightning_ring.gradients.bucket import Bucket
from lightning_ring.gradients.layout import BucketLayout
from lightning_ring.gradients.memory import unreadable_like
from lightning_ring.host.accelerator import send

aten = torch.ops.aten
_ADDS = {aten.add_.Tensor, aten.add.Tensor}
_ZEROES = {aten.zero_.default, aten._foreach_zero_.default}
_MORE_ELEMENTWISE = {"copy", "fill", "zero", "masked_fill", "clone", "_to_copy"} | {
    f"{value}_like" for value in ("zeros", "ones", "full", "empty")
}


_TO_DO = (
    "Under strategy='ring_sharded' each rank has a part of an averaged gradient, and can only "
    "change its elements (param.grad.mul_(0.5)). To clip, or to measure a norm "
    "(max_norm=float('inf')), call clip_grad_norm_(parameters, max_norm) of the strategy, or of "
    "what distribute(...) returned. To read whole gradients use strategy='ring', or "
    "torch.autograd.grad(...) for those of this rank."
)


class GradientPart:
    """This rank's part of the gradient ``name``: ``numel`` elements from ``first`` on, in the order
    of memory.

    Args:
        like: A tensor with the size and the dense strides of the gradient.
    """

    def __init__(self, name: str, like: Tensor, first: int, numel: int, comm: Communicator) -> None:
        self.name, self.first, self.numel, self.comm = name, first, numel, comm
        self.size, self.strides = like.size(), like.stride()
        self._blanks = {like.dtype: unreadable_like(like, f"{name}.grad was read. {_TO_DO}")}

    def of(self, whole: Tensor) -> Tensor:
        """The part of a tensor with the size and strides of the gradient, as a 1-D view."""
        return whole.as_strided((self.numel,), (1,), int(whole.storage_offset()) + self.first)

    def laid_out(self, whole: Tensor) -> Tensor:
        """``whole``, which may be broadcast, with the size and strides of the gradient."""
        if whole.size() == self.size and whole.stride() == self.strides and not whole.is_sparse:
            return whole
        dense = whole.to_dense() if whole.is_sparse else whole
        return torch.empty_strided(
            self.size, self.strides, dtype=whole.dtype, device=whole.device
        ).copy_(dense)

    def blank(self, like: Tensor) -> Tensor:
        """A tensor without readable values that has the form of the gradient, with dtype and
        device of ``like``.
        """
        blank = self._blanks.get(like.dtype)
        if blank is None or blank.device != like.device:
            form = torch.empty_strided(
                self.size, self.strides, dtype=like.dtype, device=like.device
            )
            blank = self._blanks[like.dtype] = unreadable_like(
                form, f"{self.name}.grad was read. {_TO_DO}"
            )
        return blank


@dataclass(slots=True)
class _Contents:
    """Those of a gradient, and of everything that ``detach()`` made of it."""

    average: Tensor  # this rank's part, 1-D
    # what backward has added since, of this rank alone; the whole gradient
    local: Tensor | None = None


class ShardedGradient(Tensor):
    """A gradient that was averaged over ranks, of which this rank has a part.

    Elementwise operations, in place or not, work on the part. A loss scaler's search for infinities
    covers the parts of all ranks. Any other operation is an error, on every rank. A backward that
    adds to the average leaves it apart from the sum over its own gradients, which alone is averaged
    next.
    """

    part: GradientPart
    contents: _Contents

    # no call from Python is looked at before it arrives in `__torch_dispatch__`
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, part: GradientPart, contents: _Contents) -> ShardedGradient:
        gradient = Tensor._make_subclass(cls, part.blank(contents.average))
        gradient.part, gradient.contents = part, contents
        return gradient

    @classmethod
    def of(cls, part: GradientPart, average: Tensor) -> ShardedGradient:
        return cls(part, _Contents(average))

    def own(self, part: GradientPart | None) -> Tensor:
        """The average of ``part``, 1-D, to be changed in place."""
        self._check_is_of(part)
        if self.contents.local is not None:
            raise RingError(
                f"a backward has added to {self.part.name}.grad after it was averaged, and the sum "
                "is not averaged yet. The backward ran inside no_sync() or outside the training, "
                "or has not ended (you are in one of its hooks). Use the gradient after the next "
                "backward that averages, or call zero_grad() first."
            )
        return self.contents.average

    def set_aside(self, part: GradientPart | None) -> Tensor | None:
        """Leave the memory of the average, which is about to be used. Returns what backward has
        added to it.
        """
        self._check_is_of(part)
        contents, local = self.contents, self.contents.local
        contents.average, contents.local = contents.average.clone(), None
        return local

    def _check_is_of(self, part: GradientPart | None) -> None:
        if self.part is not part:
            of = "a parameter of an earlier training" if part is None else part.name
            raise RingError(
                f"the gradient of {self.part.name} was used as that of {of}. Under "
                "strategy='ring_sharded' each rank has a part of a gradient, and other elements "
                "of another one. Call zero_grad() before a new training; give a parameter its own "
                "gradient, or a whole tensor."
            )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is aten.detach.default:
            return cls(args[0].part, args[0].contents)
        if func in _ADDS and isinstance(args[0], cls) and _backward_accumulates():
            return args[0]._accumulate(args[1], in_place=func is aten.add_.Tensor)
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            return _unscale(*args)
        kwargs = kwargs or {}
        if not _is_elementwise(func):
            _refuse(func, args, kwargs)
        if func in _ZEROES:
            for gradient in tree_leaves(args[0]):
                if isinstance(gradient, cls):
                    gradient.contents.local = None
        if func._schema.name.startswith("aten::_foreach_"):
            return _on_each(func, args, kwargs)
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, cls))
        return first._elementwise(func, args, kwargs)

    def _accumulate(self, gradient: Tensor, *, in_place: bool) -> ShardedGradient:
        """Called by autograd. ``gradient`` may belong to others too."""
        contents, more = self.contents, gradient.detach()
        more = more.to_dense() if more.is_sparse else more
        contents.local = more.clone() if contents.local is None else contents.local.add_(more)
        return self if in_place else ShardedGradient(self.part, contents)

    def _elementwise(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        changes = func._schema.is_mutable
        if changes and not (
            isinstance(args[0], ShardedGradient) and func._schema.name.endswith("_")
        ):
            self._refuse(func)
        part = self.part
        result = func(
            *(_own(value, part) for value in args),
            **{key: _own(kwargs[key], part) for key in kwargs},
        )
        return args[0] if changes else ShardedGradient.of(self.part, result)

    def _refuse(self, what: Any) -> NoReturn:
        name = what if isinstance(what, str) else what._schema.name
        raise RingError(f"{name} was called with {self.part.name}.grad. {_TO_DO}")

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Also where a module moves to another device or dtype."""
        if isinstance(value, ShardedGradient):
            Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
            self.contents = value.contents
        else:
            self.copy_(value)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        first, size = self.part.first, tuple(self.part.size)
        return (
            f"ShardedGradient({self.part.name}, size={size}, elements {first} to "
            f"{first + self.part.numel})"
        )

    def numpy(self, **_: Any) -> NoReturn:
        self._refuse("numpy()")

    def tolist(self) -> NoReturn:
        self._refuse("tolist()")

    def __deepcopy__(self, _: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, _: Any) -> NoReturn:
        self._refuse("pickle")


def _backward_accumulates() -> bool:
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


@functools.cache
def _is_elementwise(func: Any) -> bool:
    """Whether each element of the result depends on one element of each argument, and on nothing
    else.
    """
    schema = func._schema
    name = schema.name.removeprefix("aten::").removesuffix("_")
    if name.removeprefix("_foreach_") in _MORE_ELEMENTWISE:
        return True
    if name.startswith("_foreach_"):  # these have no tags
        operator = getattr(aten, name.removeprefix("_foreach_"), None)
        overloads = () if operator is None else operator.overloads()
        return name not in ("_foreach_max", "_foreach_min") and any(
            torch.Tag.pointwise in getattr(operator, one).tags for one in overloads
        )
    gives_tensor = all(isinstance(value.type, torch.TensorType) for value in schema.returns)
    return (
        gives_tensor
        and torch.Tag.pointwise in func.tags
        and torch.Tag.nondeterministic_seeded not in func.tags
    )


def _refuse(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
    leaves = tree_leaves((args, dict(kwargs)))
    next(leaf for leaf in leaves if isinstance(leaf, ShardedGradient))._refuse(func)


def _own(value: Any, part: GradientPart | None) -> Any:
    """This rank's ``part`` of ``value``, if it is a tensor: an argument of an elementwise
    operation.
    """
    if isinstance(value, ShardedGradient):
        return value.own(part)
    if part is not None and isinstance(value, Tensor) and value.dim():
        return part.of(part.laid_out(value))
    return value


def _on_each(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """``func``, an elementwise operation on lists of tensors."""
    lists = [
        value for value in args if isinstance(value, (list, tuple)) and isinstance(value[0], Tensor)
    ]
    columns = zip(*lists, strict=True)
    parts = [
        next((one.part for one in column if isinstance(one, ShardedGradient)), None)
        for column in columns
    ]
    changes = func._schema.is_mutable
    if changes and any(
        part and not isinstance(one, ShardedGradient)
        for one, part in zip(lists[0], parts, strict=True)
    ):
        _refuse(func, args, kwargs)

    def own(value: Any) -> Any:
        if not any(value is one for one in lists):
            return value
        return [_own(one, part) for one, part in zip(value, parts, strict=True)]

    results = func(*map(own, args), **kwargs)
    if changes:
        return None
    return [
        one if part is None else ShardedGradient.of(part, one)
        for one, part in zip(results, parts, strict=True)
    ]


def _unscale(gradients: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """As `GradScaler` calls it, on all ranks: an infinity in one rank's part counts on all."""
    sharded = [gradient for gradient in gradients if isinstance(gradient, ShardedGradient)]
    own = [
        gradient.own(gradient.part) if isinstance(gradient, ShardedGradient) else gradient
        for gradient in gradients
    ]
    torch._amp_foreach_non_finite_check_and_unscale_(own, found_inf, inverse_scale)
    sharded[0].part.comm.all_reduce_(found_inf.view(1), op=ReduceOp.MAX, name="found inf").wait()


class GradientShards:
    """The shard of a bucket is `shard_bounds` of ``bucket.flat`` for ``comm.shard_index``.

    Of use once the layout is final.
    """

    def __init__(self, layout: BucketLayout, comm: Communicator) -> None:
        self._layout = layout
        self.comm = comm
        self._parts: dict[Parameter, GradientPart] = {}
        # of the pieces of its shard: a gap and a part in turn
        self._sizes: dict[Bucket, list[int]] = {}

    def bounds(self, param: Parameter, shard_index: int | None = None) -> tuple[Bucket, int, int]:
        """The bucket of ``param``, and begin and end of a rank's part in its ``flat``; the part may
        be empty.

        This rank's, unless another ``shard_index`` is given.
        """
        bucket, slot = self._layout.slots[param]
        first, last = self._shard(bucket, shard_index)
        offset = int(bucket.views[slot].storage_offset() - bucket.flat.storage_offset())
        start = min(max(first, offset), offset + param.numel())
        return bucket, start, max(start, min(last, offset + param.numel()))

    def part(self, param: Parameter) -> GradientPart:
        """Which elements of the gradient of ``param`` are this rank's."""
        if (part := self._parts.get(param)) is None:
            bucket, start, stop = self.bounds(param)
            _, slot = self._layout.slots[param]
            view = bucket.views[slot]
            first = start - int(view.storage_offset() - bucket.flat.storage_offset())
            part = GradientPart(bucket.names[slot], view, first, stop - start, self.comm)
            self._parts[param] = part
        return part

    def averages(self, bucket: Bucket) -> dict[Parameter, Tensor]:
        """This rank's parts of the gradients in ``bucket``, 1-D, as memory that other code may
        hold.
        """
        if (sizes := self._sizes.get(bucket)) is None:
            first, last = self._shard(bucket)
            bounds = [edge for param in bucket.params for edge in self.bounds(param)[1:]]
            edges = [first, *(min(max(edge, first), last) for edge in bounds), last]
            self._sizes[bucket] = sizes = [stop - start for start, stop in pairwise(edges)]
        return dict(
            zip(bucket.params, bucket.lend(*self._shard(bucket)).split(sizes)[1::2], strict=True)
        )

    def of_gradient(self, param: Parameter) -> Tensor | None:
        """This rank's part of ``param.grad`` in the order of memory, 1-D, to be changed in
        place.
        """
        grad, part = param.grad, self.part(param)
        if grad is None:
            return None
        if isinstance(grad, ShardedGradient):
            return grad.own(part)
        whole = part.laid_out(grad)  # other code has set it
        if whole is not grad:
            param.grad = whole
        return part.of(whole.detach())

    def _shard(self, bucket: Bucket, shard_index: int | None = None) -> tuple[int, int]:
        index = self.comm.shard_index if shard_index is None else shard_index
        return shard_bounds(bucket.flat.numel(), self.comm.world_size, index)


@torch.no_grad()
def sum_of_squares(params: Sequence[Parameter], world_size: int) -> Tensor:
    """What this rank adds to the squared norm of the gradients of ``params``.

    0-d, float64, on the gradients' device; the host does not wait for it. A parameter without a
    gradient counts as zero. Of a `ShardedGradient` this rank has a part. Other gradients are the
    same on ``world_size`` ranks: each adds 1/N of their squares.
    """
    grads = []
    for grad in (param.grad for param in params):
        if isinstance(grad, ShardedGradient):
            grads.append((grad.own(grad.part), 1.0))
        elif grad is not None:
            values = grad.coalesce().values() if grad.is_sparse else grad
            grads.append((values, 1.0 / world_size))
    if not grads:
        return torch.zeros((), dtype=torch.float64)
    # 16-bit types have too little range and precision for a sum of squares
    norms = torch._foreach_norm(
        [grad.float() if grad.element_size() < 4 else grad for grad, _ in grads]
    )
    device = grads[0][0].device
    squares = torch.stack([norm.to(device, torch.float64) for norm in norms]).square_()
    shares = torch.tensor([share for _, share in grads], dtype=torch.float64)
    return squares.dot(send(shares, device))
