"""The collectives that scripts call, with gradients through those that wait."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import torch
from torch import Tensor

from lightning_ring.horovod.collectives import Average, Sum, reduction, start, synchronize
from lightning_ring.horovod.compression import Compression
from lightning_ring.horovod.context import ProcessSet, global_process_set, rank

P = ParamSpec("P")
_ALL = global_process_set
Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def _waiting(start_it: Callable[P, int]) -> Callable[P, Any]:
    """Of a function that returns a handle: the one that waits for the result."""

    @functools.wraps(start_it)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        return synchronize(start_it(*args, **kwargs))

    call.__name__ = call.__qualname__ = start_it.__name__.replace("_async", "")
    call.__doc__ = f"Call `{start_it.__name__}` and wait for its result."
    return call


def _in_place(start_it: Callable[P, int]) -> Callable[P, int]:
    """Of a function that returns a handle: the one whose results go into its tensors."""

    @functools.wraps(start_it)
    def call(*args: P.args, **kwargs: P.kwargs) -> int:
        return start_it(*args, _in_place=True, **kwargs)  # type: ignore[arg-type]

    call.__name__ = call.__qualname__ = f"{start_it.__name__}_"
    call.__doc__ = f"As `{start_it.__name__}`, with the result in the tensor that it was given."
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


def through(
    run: Run, back: Run, tensors: Sequence[Tensor], compression: Any = Compression.none
) -> list[Tensor]:
    sent = [compression.compress(tensor) for tensor in tensors]
    found = _Through.apply(run, back, *[tensor for tensor, _ in sent])
    contexts = [context for _, context in sent]
    return [compression.decompress(*one) for one in zip(found, contexts, strict=True)]


def run_collective(
    kind: str, tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, **options: Any
) -> list[Tensor]:
    results: list[Tensor] = synchronize(
        start(kind, tensors, name, process_set, grouped=True, **options)
    )
    return results


# -- allreduce


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
    settings = average, name, op, prescale_factor, postscale_factor, process_set
    return grouped_allreduce_async([tensor], *settings, _in_place=_in_place, _grouped=False)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
    *,
    _in_place: bool = False,
    _grouped: bool = True,
) -> int:
    """Start `grouped_allreduce` and return its handle."""
    return start(
        "allreduce",
        tensors,
        name,
        process_set,
        op=reduction(average, op),
        prescale=prescale_factor,
        postscale=postscale_factor,
        in_place=_in_place,
        grouped=_grouped,
    )


allreduce_async_ = _in_place(allreduce_async)
grouped_allreduce_async_ = _in_place(grouped_allreduce_async)
allreduce_ = _waiting(allreduce_async_)
grouped_allreduce_ = _waiting(grouped_allreduce_async_)


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
    reduce = functools.partial(
        run_collective,
        "allreduce",
        process_set=process_set,
        op=reduction(average, op),
        prescale=prescale_factor,
        postscale=postscale_factor,
    )
    run = functools.partial(reduce, name=name)
    return through(run, functools.partial(reduce, name=None), tensors, compression)


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
    factors = prescale_factor, postscale_factor
    return grouped_allreduce([tensor], average, name, compression, op, *factors, process_set)[0]


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: str = Average, process_set: ProcessSet = _ALL
) -> Callable[[], Tensor]:
    """All-reduce a sparse tensor: every rank gets all entries. Returns a function that waits for
    the result.
    """
    if reduction(None, op) not in (Average, Sum):
        raise NotImplementedError(f"sparse_allreduce_async got op={op}, expected Average or Sum.")
    whole = tensor.coalesce()
    handles = [
        allgather_async(whole.values(), f"{name}.values", process_set),
        allgather_async(whole.indices().t().contiguous(), f"{name}.indices", process_set),
    ]

    def result() -> Tensor:
        values, indices = (synchronize(handle) for handle in handles)
        if op == Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.t(), values, whole.size()).coalesce()

    return result


# -- allgather


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = _ALL) -> int:
    """Start `allgather` and return its handle."""
    return start("allgather", [_with_rows(tensor)], name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = _ALL
) -> int:
    """Start `grouped_allgather` and return its handle."""
    return start("allgather", [*map(_with_rows, tensors)], name, process_set, grouped=True)


def _with_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = _ALL
) -> list[Tensor]:
    """As `allgather` for each of ``tensors``."""
    tensors = [*map(_with_rows, tensors)]
    own = torch.tensor([[tensor.shape[0] for tensor in tensors]])

    def back(grads: Sequence[Tensor]) -> list[Tensor]:
        counts = run_collective("allgather", [own], None, process_set)[0].t().tolist()
        means = run_collective("allreduce", grads, None, process_set, op=Average)
        parts = [mean.split(rows) for mean, rows in zip(means, counts, strict=True)]
        return [part[process_set.rank()] for part in parts]

    return through(lambda sent: run_collective("allgather", sent, name, process_set), back, tensors)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = _ALL) -> Tensor:
    """The ranks' tensors, one after the other in the first dimension, in which they may differ."""
    return grouped_allgather([tensor], name, process_set)[0]


# -- broadcast


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
    return start("broadcast", [tensor], name, process_set, root=root, in_place=_in_place)


broadcast_async_ = _in_place(broadcast_async)
broadcast_ = _waiting(broadcast_async_)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = _ALL
) -> Tensor:
    """Rank ``root_rank``'s ``tensor``, in new memory. The rank is that of the job."""

    def run(sent: Sequence[Tensor]) -> list[Tensor]:
        return [synchronize(broadcast_async(sent[0], root_rank, name, process_set))]

    def back(grads: Sequence[Tensor]) -> list[Tensor]:
        mean = run_collective("allreduce", grads, None, process_set, op=Average)
        return mean if rank() == root_rank else [torch.zeros_like(mean[0])]

    return through(run, back, [tensor])[0]


# -- alltoall


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = _ALL,
) -> int:
    """Start an `alltoall` and return its handle.

    `synchronize` returns the rows and the received splits, even if no splits were given.
    """
    rows = checked_splits(tensor, splits, process_set.size())
    return start("alltoall", [tensor], name, process_set, splits=rows)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = _ALL,
) -> Any:
    """Send ``splits[r]`` rows of ``tensor`` to rank r, and return what this rank got from ranks 0,
    1, ...

    Without ``splits`` every rank gets as many rows. With them the numbers of received rows are
    returned too.
    """

    num_rows = len(tensor) if tensor.dim() else 0

    def run(sent: Sequence[Tensor]) -> Any:
        return synchronize(alltoall_async(sent[0], splits, name, process_set))

    def back(grads: Sequence[Tensor]) -> list[Tensor]:
        handle = alltoall_async(grads[0].contiguous(), received, None, process_set)
        grad, _ = synchronize(handle)
        missing = grad.new_zeros(num_rows - grad.shape[0], *grad.shape[1:])
        return [torch.cat([grad, missing])]  # zeros for rows that no rank got

    found, received = _Through.apply(run, back, tensor)
    return found if splits is None else (found, received)


def checked_splits(
    tensor: Tensor, splits: Tensor | Sequence[int] | None, size: int
) -> tuple[int, ...]:
    if tensor.dim() == 0:
        raise ValueError(
            "alltoall got a tensor without dimensions; rows of the first dimension are sent."
        )
    rows = tensor.shape[0]
    if splits is None and rows % size:
        raise ValueError(
            f"alltoall got {rows} rows and no splits; {rows} is not a multiple of {size} ranks."
        )
    if isinstance(splits, Tensor) and splits.dtype != torch.int32:
        raise ValueError(f"alltoall got splits of {splits.dtype}, expected torch.int32.")
    numbers = (rows // size,) * size if splits is None else tuple(map(int, splits))
    if len(numbers) != size or min(numbers) < 0 or sum(numbers) > rows:
        raise ValueError(
            f"alltoall got splits {list(numbers)} for {rows} rows and {size} ranks, expected "
            f"{size} numbers of rows whose sum is at most {rows}."
        )
    return numbers


# -- reducescatter


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSet = _ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    _grouped: bool = True,
) -> int:
    """Start `grouped_reducescatter` and return its handle."""
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(
            "reducescatter got a tensor without dimensions; rows of the first "
            "dimension are scattered."
        )
    if reduction(None, op) not in (Average, Sum):
        raise NotImplementedError(f"reducescatter got op={op}, expected Average or Sum.")
    return start(
        "reducescatter",
        tensors,
        name,
        process_set,
        op=op,
        prescale=prescale_factor,
        postscale=postscale_factor,
        grouped=_grouped,
    )


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSet = _ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start `reducescatter` and return its handle."""
    factors = prescale_factor, postscale_factor
    return grouped_reducescatter_async([tensor], name, op, process_set, *factors, _grouped=False)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: str = Average,
    process_set: ProcessSet = _ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """As `reducescatter` for each of ``tensors``."""
    factors = prescale_factor, postscale_factor

    def run(sent: Sequence[Tensor]) -> Any:
        return synchronize(grouped_reducescatter_async(sent, name, op, process_set, *factors))

    def back(grads: Sequence[Tensor]) -> list[Tensor]:
        factor = prescale_factor * postscale_factor * (process_set.size() if op == Sum else 1)
        return run_collective("allgather", [grad * factor for grad in grads], None, process_set)

    return through(run, back, tensors, compression)


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
    factors = prescale_factor, postscale_factor
    return grouped_reducescatter([tensor], name, compression, op, process_set, *factors)[0]
