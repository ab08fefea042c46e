"""The collectives that scripts call, with gradients through those that wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ring.horovod.collectives import (
    Average,
    Sum,
    reduction,
    start,
    start_alltoall,
    start_broadcast,
    start_reduction,
    synchronize,
)
from lightning_ring.horovod.compression import Compression
from lightning_ring.horovod.context import ProcessSet, global_process_set, rank

_ALL = global_process_set


# -- allreduce


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> int:
    chosen = reduction(average, op)
    return start_reduction(
        "allreduce", [tensor], name, chosen, prescale_factor, postscale_factor, process_set
    )


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> int:
    chosen = reduction(average, op)
    factors = prescale_factor, postscale_factor
    return start_reduction(
        "allreduce", [tensor], name, chosen, *factors, process_set, in_place=True
    )


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> Tensor:
    result: Tensor = synchronize(
        allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    )
    return result


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, grouped: bool, name: str | None, options: tuple[Any, ...], *tensors: Tensor
    ) -> Any:
        ctx.grouped, ctx.options = grouped, options
        handle = start_reduction("allreduce", tensors, name, *options, grouped=grouped)
        found = synchronize(handle)
        return tuple(found) if grouped else found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        found = synchronize(
            start_reduction("allreduce", grads, None, *ctx.options, grouped=ctx.grouped)
        )
        return None, None, None, *(found if ctx.grouped else [found])


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> Tensor:
    """``tensor`` reduced over the ranks of the process set, in new memory; the mean by default."""
    sent, context = compression.compress(tensor)
    options = reduction(average, op), prescale_factor, postscale_factor, process_set
    found: Tensor = compression.decompress(_Allreduce.apply(False, name, options, sent), context)
    return found


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> int:
    factors = prescale_factor, postscale_factor
    return start_reduction(
        "allreduce", tensors, name, reduction(average, op), *factors, process_set, grouped=True
    )


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> int:
    options = reduction(average, op), prescale_factor, postscale_factor, process_set
    return start_reduction("allreduce", tensors, name, *options, grouped=True, in_place=True)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> list[Tensor]:
    result: list[Tensor] = synchronize(
        grouped_allreduce_async_(
            tensors, average, name, op, prescale_factor, postscale_factor, process_set
        )
    )
    return result


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
) -> list[Tensor]:
    """As `allreduce` for each of ``tensors``, which travel together."""
    sent, contexts = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    options = reduction(average, op), prescale_factor, postscale_factor, process_set
    found = _Allreduce.apply(True, name, options, *sent)
    return [
        compression.decompress(one, context) for one, context in zip(found, contexts, strict=True)
    ]


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: str = Average, process_set: ProcessSet = _ALL
) -> Callable[[], Tensor]:
    """All-reduce a sparse tensor: every rank gets all entries. Returns a function that waits for
    the result.
    """
    if reduction(None, op) not in (Average, Sum):
        raise NotImplementedError(f"sparse_allreduce_async got op={op}, expected Average or Sum.")
    whole = tensor.coalesce()
    entries, places = whole.values(), whole.indices().t().contiguous()
    handles = [
        allgather_async(entries, f"{name}.values", process_set),
        allgather_async(places, f"{name}.indices", process_set),
    ]

    def result() -> Tensor:
        values, indices = (synchronize(handle) for handle in handles)
        if reduction(None, op) == Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.t(), values, whole.size()).coalesce()

    return result


# -- allgather


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = _ALL) -> int:
    return start("allgather", [_with_rows(tensor)], name, process_set)


def _with_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, grouped: bool, name: str | None, process_set: ProcessSet, *tensors: Tensor
    ) -> Any:
        ctx.process_set = process_set
        ctx.rows = [tensor.shape[0] for tensor in tensors]
        found = synchronize(start("allgather", tensors, name, process_set, grouped=grouped))
        return tuple(found) if grouped else found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        own, results = ctx.process_set, []
        counts = synchronize(start("allgather", [torch.tensor([ctx.rows])], None, own)).tolist()
        for index, grad in enumerate(grads):
            mean = synchronize(start_reduction("allreduce", [grad], None, Average, 1.0, 1.0, own))
            results.append(mean.split([row[index] for row in counts])[own.rank()])
        return None, None, None, *results


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = _ALL) -> Tensor:
    """The ranks' tensors, one after the other in the first dimension, in which they may differ."""
    found: Tensor = _Allgather.apply(False, name, process_set, _with_rows(tensor))
    return found


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = _ALL
) -> int:
    return start(
        "allgather", [_with_rows(tensor) for tensor in tensors], name, process_set, grouped=True
    )


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = _ALL
) -> list[Tensor]:
    return list(_Allgather.apply(True, name, process_set, *map(_with_rows, tensors)))


# -- broadcast


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = _ALL
) -> int:
    return start_broadcast(tensor, root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = _ALL
) -> int:
    return start_broadcast(tensor, root_rank, name, process_set, in_place=True)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = _ALL
) -> Tensor:
    result: Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(start_broadcast(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        mean = synchronize(
            start_reduction("allreduce", grads, None, Average, 1.0, 1.0, ctx.process_set)
        )
        return (mean if rank() == ctx.root_rank else torch.zeros_like(mean)), None, None, None


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = _ALL
) -> Tensor:
    """Rank ``root_rank``'s ``tensor``, in new memory. The rank is that of the job."""
    found: Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
    return found


# -- alltoall


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = _ALL,
) -> int:
    """Start an `alltoall` and return its handle.

    `synchronize` returns the rows and the received splits, even if no splits were given.
    """
    return start_alltoall(tensor, splits, name, process_set)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Tensor | None, name: str | None, process_set: ProcessSet
    ) -> Any:
        found, received = synchronize(start_alltoall(tensor, splits, name, process_set))
        ctx.received, ctx.process_set, ctx.rows = received, process_set, tensor.shape[0]
        ctx.mark_non_differentiable(received)
        return found, received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad, _ = synchronize(
            start_alltoall(grads[0].contiguous(), ctx.received, None, ctx.process_set)
        )
        missing = ctx.rows - grad.shape[0]  # rows that no rank got
        return (
            (torch.cat([grad, grad.new_zeros(missing, *grad.shape[1:])]) if missing else grad),
            None,
            None,
            None,
        )


def alltoall(
    tensor: Tensor,
    splits: Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = _ALL,
) -> Any:
    """Send ``splits[r]`` rows of ``tensor`` to rank r, and return what this rank got from ranks 0,
    1, ...

    Without ``splits`` every rank gets as many rows. With them the numbers of received rows are
    returned too.
    """
    found, received = _Alltoall.apply(tensor, splits, name, process_set)
    return found if splits is None else (found, received)


# -- reducescatter


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSet = _ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    return _start_reducescatter([tensor], name, op, prescale_factor, postscale_factor, process_set)


def _start_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: str,
    pre: float,
    post: float,
    own: ProcessSet,
    *,
    grouped: bool = False,
) -> int:
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(
            "reducescatter got a tensor without dimensions; rows of the first "
            "dimension are scattered."
        )
    if reduction(None, op) not in (Average, Sum):
        raise NotImplementedError(f"reducescatter got op={op}, expected Average or Sum.")
    return start_reduction("reducescatter", tensors, name, op, pre, post, own, grouped=grouped)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, grouped: bool, name: str | None, options: tuple[Any, ...], *tensors: Tensor
    ) -> Any:
        ctx.grouped, ctx.options = grouped, options
        found = synchronize(_start_reducescatter(tensors, name, *options, grouped=grouped))
        return tuple(found) if grouped else found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        op, pre, post, own = ctx.options
        factor = pre * post * (own.size() if op == Sum else 1)
        found = synchronize(
            start("allgather", [grad * factor for grad in grads], None, own, grouped=ctx.grouped)
        )
        return None, None, None, *(found if ctx.grouped else [found])


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str = Average,
    process_set: ProcessSet = _ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce ``tensor`` over the ranks. Each gets its rows of the result; the first ranks may
    get one more.
    """
    sent, context = compression.compress(tensor)
    options = op, prescale_factor, postscale_factor, process_set
    found: Tensor = compression.decompress(
        _Reducescatter.apply(False, name, options, sent), context
    )
    return found


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSet = _ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    return _start_reducescatter(
        tensors, name, op, prescale_factor, postscale_factor, process_set, grouped=True
    )


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: str = Average,
    process_set: ProcessSet = _ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    sent, contexts = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    found = _Reducescatter.apply(
        True, name, (op, prescale_factor, postscale_factor, process_set), *sent
    )
    return [
        compression.decompress(one, context) for one, context in zip(found, contexts, strict=True)
    ]
