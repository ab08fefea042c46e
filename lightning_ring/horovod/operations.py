"""The collectives that scripts call, with gradients through those that wait."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from lightning_ring.horovod.collectives import Average, Sum, group_of, reduction, start, synchronize
from lightning_ring.horovod.compression import Compression
from lightning_ring.horovod.context import ProcessSet, global_process_set, rank

P = ParamSpec("P")
T = TypeVar("T")
_ALL = global_process_set
Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def _in_place(start_it: Callable[P, int], name: str, *, waits: bool = False) -> Callable[P, Any]:
    """From a function that returns a handle: the in-place one, or the one that waits too."""

    @functools.wraps(start_it)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        handle = start_it(*args, _in_place=True, **kwargs)  # type: ignore[arg-type]
        return synchronize(handle) if waits else handle

    call.__name__ = call.__qualname__ = name
    handed = "which it waits for" if waits else "once it is done"
    call.__doc__ = f"As `{start_it.__name__}`, with the result in its tensor, {handed}."
    return call


def _grouped(
    single: Callable[Concatenate[Tensor, P], Any],
) -> Callable[Concatenate[Sequence[Tensor], P], Any]:
    """From a function of one tensor: the grouped one."""

    @functools.wraps(single)
    def call(tensors: Sequence[Tensor], *args: P.args, **kwargs: P.kwargs) -> Any:
        return single(tensors, *args, **kwargs)  # type: ignore[arg-type]  # `start` takes both

    call.__name__ = call.__qualname__ = f"grouped_{single.__name__}"
    call.__doc__ = f"As `{single.__name__}` for each of ``tensors``, which travel together."
    return call


class _Through(torch.autograd.Function):
    """Runs ``run`` on tensors, and ``back`` on the gradients of its results."""

    @staticmethod
    def forward(ctx: Any, run: Run, back: Run, *tensors: Tensor) -> Any:
        ctx.back = back
        return tuple(run(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *ctx.back(grads)


def _through(run: Run, back: Run, tensors: T, compression: Any = Compression.none) -> T:
    """``run`` on one tensor, or on a list."""
    group = group_of(tensors)
    sent = [compression.compress(tensor) for tensor in group]
    found = _Through.apply(run, back, *[tensor for tensor, _ in sent])
    contexts = [context for _, context in sent]
    results: Any = [*map(compression.decompress, found, contexts)]
    return results if group is tensors else results[0]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
    *,
    _in_place: bool = False,
) -> int:
    """Start `allreduce` and return its handle."""
    return start(
        "allreduce",
        tensor,
        name,
        process_set,
        op=reduction(average, op),
        prescale=prescale_factor,
        postscale=postscale_factor,
        in_place=_in_place,
    )


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

    def run(sent: Any, name: str | None = name) -> Any:
        factors = prescale_factor, postscale_factor
        return synchronize(allreduce_async(sent, average, name, op, *factors, process_set))

    # a name lets the gradients be told by number, too
    back = functools.partial(run, name=name and f"{name}.gradients")
    return _through(run, back, tensor, compression)


allreduce_async_ = _in_place(allreduce_async, "allreduce_async_")
allreduce_ = _in_place(allreduce_async, "allreduce_", waits=True)
grouped_allreduce_async = _grouped(allreduce_async)
grouped_allreduce_async_ = _grouped(allreduce_async_)
grouped_allreduce_ = _grouped(allreduce_)
grouped_allreduce = _grouped(allreduce)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: str = Average, process_set: ProcessSet = _ALL
) -> Callable[[], Tensor]:
    """All-reduce a sparse tensor. Returns a function that waits for all ranks' entries."""
    if reduction(None, op) not in (Average, Sum):
        raise NotImplementedError(f"sparse_allreduce_async got op={op}, expected Average or Sum.")
    whole = tensor.coalesce()
    sent = [whole.values(), whole.indices().t()]
    handle = grouped_allgather_async(sent, name, process_set)

    def result() -> Tensor:
        values, indices = synchronize(handle)
        if op == Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.t(), values, whole.size()).coalesce()

    return result


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = _ALL) -> int:
    """Start `allgather` and return its handle."""
    return start("allgather", torch.atleast_1d(tensor), name, process_set)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = _ALL) -> Tensor:
    """The ranks' tensors, concatenated; their first dimensions may differ."""
    own = torch.tensor([[one.shape[:1].numel() for one in group_of(tensor)]])

    def run(sent: Any) -> Any:
        return synchronize(allgather_async(sent, name, process_set))

    def back(grads: Any) -> list[Tensor]:
        counts = synchronize(allgather_async(own, None, process_set)).t().tolist()
        means = synchronize(allreduce_async(grads, process_set=process_set))
        parts = [mean.split(rows) for mean, rows in zip(means, counts, strict=True)]
        return [part[process_set.rank()] for part in parts]

    return _through(run, back, tensor)


grouped_allgather_async = _grouped(allgather_async)
grouped_allgather = _grouped(allgather)


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = _ALL,
    *,
    _in_place: bool = False,
) -> int:
    """Start `broadcast` and return its handle."""
    if root_rank not in process_set.ranks:
        raise ValueError(
            f"broadcast got root_rank={root_rank}, which is not one of the ranks "
            f"{process_set.ranks}."
        )
    root = process_set.ranks.index(root_rank)
    return start("broadcast", tensor, name, process_set, root=root, in_place=_in_place)


broadcast_async_ = _in_place(broadcast_async, "broadcast_async_")
broadcast_ = _in_place(broadcast_async, "broadcast_", waits=True)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = _ALL
) -> Tensor:
    """Rank ``root_rank``'s ``tensor``, in new memory. The rank is that of the job."""

    def run(sent: Any) -> Any:
        return synchronize(broadcast_async(sent, root_rank, name, process_set))

    def back(grads: Any) -> Any:
        mean = synchronize(allreduce_async(grads, process_set=process_set))
        return mean if rank() == root_rank else [torch.zeros_like(mean[0])]

    return _through(run, back, tensor)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = _ALL,
) -> int:
    """Start an `alltoall` and return its handle.

    `synchronize` returns the rows and the received splits.
    """
    return start("alltoall", tensor, name, process_set, splits=splits)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = _ALL,
) -> Any:
    """Send ``splits[r]`` rows of ``tensor`` to rank r; return the rows from ranks 0, 1, ...

    Without ``splits`` every rank gets as many rows; with them received splits are returned too.
    """
    shape = tensor.shape

    def run(sent: Sequence[Tensor]) -> Any:
        return synchronize(alltoall_async(sent[0], splits, name, process_set))

    def back(grads: Sequence[Tensor]) -> list[Tensor]:
        handle = alltoall_async(grads[0].contiguous(), received, None, process_set)
        grad, _ = synchronize(handle)
        missing = grad.new_zeros(shape[0] - grad.shape[0], *shape[1:])
        return [torch.cat([grad, missing])]  # zeros for rows that no rank got

    found, received = _Through.apply(run, back, tensor)
    return found if splits is None else (found, received)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSet = _ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start `reducescatter` and return its handle."""
    if reduction(None, op) not in (Average, Sum):
        raise NotImplementedError(f"reducescatter got op={op}, expected Average or Sum.")
    factors: Any = {"prescale": prescale_factor, "postscale": postscale_factor}
    return start("reducescatter", tensor, name, process_set, op=op, **factors)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str = Average,
    process_set: ProcessSet = _ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce ``tensor``. Each rank gets its rows; the first ranks may get one more."""
    factors = prescale_factor, postscale_factor

    def run(sent: Any) -> Any:
        return synchronize(reducescatter_async(sent, name, op, process_set, *factors))

    def back(grads: Sequence[Tensor]) -> Any:
        factor = math.prod(factors) * (process_set.size() if op == Sum else 1)
        sent: Any = [grad * factor for grad in grads]
        return synchronize(allgather_async(sent, None, process_set))

    return _through(run, back, tensor, compression)


grouped_reducescatter_async = _grouped(reducescatter_async)
grouped_reducescatter = _grouped(reducescatter)
