"""Submitting collectives: each has a handle for `poll` and `synchronize`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ring.horovod.context import ProcessSet, global_process_set
from lightning_ring.horovod.execution import OPS
from lightning_ring.horovod.negotiation import Negotiation
from lightning_ring.horovod.pending import UNNAMED
from lightning_ring.horovod.requests import Meta, Submission
from lightning_ring.host.accelerator import gpu_module, is_gpu

Average, Sum, Min, Max, Product, Adasum = "Average", "Sum", "Min", "Max", "Product", "Adasum"

# by handle; whether it has a list of results
_calls: dict[int, tuple[Submission, Negotiation, bool]] = {}
_handles = itertools.count()


def poll(handle: int) -> bool:
    """Whether `synchronize` would return at once."""
    if handle not in _calls:
        raise ValueError(f"handle {handle!r} was not created here, or was synchronized before.")
    return _calls[handle][0].done


def synchronize(handle: int) -> Any:
    """Wait for a collective. Returns its result: a list if grouped, a pair for an alltoall.

    A second call returns `None`, as Horovod's does.

    Raises:
        HorovodInternalError: The collective failed, on all ranks.
    """
    call = _calls.get(handle)
    if call is None:
        return None
    request, negotiation, grouped = call
    if not request.done:
        negotiation.wait(request)
    del _calls[handle]
    results = request.outcome()
    return results if grouped else results[0]


def reduction(average: bool | None, op: str | None) -> str:
    """The operation that both arguments name. Average by default."""
    if average is not None and op is not None:
        raise ValueError("The op parameter supersedes average; only one of the two may be given.")
    chosen = op if op is not None else Sum if average is False else Average
    if chosen == Adasum:
        raise ValueError(
            "op=Adasum is not supported, expected Average or Sum. For large batches use LARS or "
            "LAMB of lightning_ring.optim with a warm-up."
        )
    if chosen not in OPS:
        raise ValueError(f"op={chosen!r} is unknown, expected one of {', '.join(OPS)}.")
    return chosen


def group_of(tensors: Any) -> Sequence[Tensor]:
    return tensors if isinstance(tensors, (list, tuple)) else [tensors]


def start(
    kind: str,
    tensors: Tensor | Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    *,
    in_place: bool = False,
    op: str = "",
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
    splits: Tensor | Sequence[int] | None = None,
) -> int:
    """Submit one collective. Tensors of a list run together."""
    group = group_of(tensors)
    if not group:
        raise ValueError(f"a grouped {kind} got no tensors.")
    negotiation = process_set.negotiation
    label = kind if name is None else f"{kind}.{name}"
    for tensor in group:
        _check(kind, tensor, label, op, in_place=in_place)
    first = group[0]
    meta = Meta(
        kind,
        tuple([tensor.shape for tensor in group]),
        tuple([tensor.dtype for tensor in group]),
        op,
        float(prescale),
        float(postscale),
        root,
        _rows(len(first), splits, process_set.size()) if kind == "alltoall" else (),
        "cpu" if first.is_cpu else first.device.type,
    )
    if name is None:  # only now: a call that was refused takes no number
        label += f".{UNNAMED}{next(negotiation.unnamed[kind])}"
    request = Submission(label, meta, group, in_place, result=[None] * len(group))
    negotiation.submit(request)
    handle = next(_handles)
    _calls[handle] = request, negotiation, group is tensors
    return handle


def _check(kind: str, tensor: Tensor, name: str, op: str, *, in_place: bool) -> None:
    """Refuse tensors that another thread cannot read or write."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: found {type(tensor)!r}, expected a torch.Tensor.")
    if kind in ("alltoall", "reducescatter") and not tensor.dim():
        raise ValueError(f"{name}: found a tensor without dimensions, expected rows to send.")
    if tensor.is_meta:
        raise ValueError(
            f"{name}: found a tensor without values (device='meta'), expected one with values."
        )
    if tensor.dtype == torch.bool and op in (Average, Sum):
        raise ValueError(
            f"{name}: op={op} got a tensor of torch.bool. Use op=Max (any), op=Min (all), or "
            ".int()."
        )
    if tensor.is_sparse:
        raise ValueError(
            f"{name}: a sparse tensor was given. Use sparse_allreduce_async, or tensor.to_dense()."
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"{name}: a view that is conjugated or negated only when it is read was given. Use "
            "tensor.resolve_conj().resolve_neg()."
        )
    if in_place and not tensor.is_contiguous():
        sizes = zip(tensor.stride(), tensor.shape, strict=True)
        if any(stride == 0 and size > 1 for stride, size in sizes):
            raise ValueError(
                f"{name}: an expanded tensor cannot be written in place. Use tensor.contiguous()."
            )
    if not tensor.is_cpu and is_gpu(tensor.device):
        gpu_module(tensor.device).current_stream(tensor.device).synchronize()


def _rows(num_rows: int, splits: Tensor | Sequence[int] | None, num_ranks: int) -> tuple[int, ...]:
    if splits is None and num_rows % num_ranks:
        raise ValueError(
            f"alltoall got {num_rows} rows and no splits; {num_rows} is not a multiple of "
            f"{num_ranks} ranks."
        )
    if isinstance(splits, Tensor) and splits.dtype != torch.int32:
        raise ValueError(f"alltoall got splits of {splits.dtype}, expected torch.int32.")
    numbers = (num_rows // num_ranks,) * num_ranks if splits is None else tuple(map(int, splits))
    if len(numbers) != num_ranks or min(numbers) < 0 or sum(numbers) > num_rows:
        raise ValueError(
            f"alltoall got splits {list(numbers)} for {num_rows} rows and {num_ranks} ranks, "
            f"expected {num_ranks} numbers of rows whose sum is at most {num_rows}."
        )
    return numbers


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the process set is here."""
    process_set.negotiation.meet("barrier", kind="barrier")


def join(device: int = -1) -> int:
    """Take part with zeros in the others' all-reduces until every rank has joined.

    This includes those of `DistributedOptimizer`. Averages still divide by all ranks. Returns the
    rank that joined last, whose parameters have made all steps: `broadcast_parameters` from there.
    ``device`` is ignored.
    """
    return global_process_set.negotiation.join()
