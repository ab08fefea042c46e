"""The asynchronous collectives: each returns a handle for `poll` and `synchronize`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ring.horovod.adasum import DTYPES as ADASUM_DTYPES
from lightning_ring.horovod.cache import UNNAMED
from lightning_ring.horovod.context import ProcessSet, global_process_set
from lightning_ring.horovod.errors import HorovodInternalError
from lightning_ring.horovod.negotiation import Negotiation
from lightning_ring.horovod.requests import Meta, Submission
from lightning_ring.host.accelerator import gpu_module, is_gpu

Average, Sum, Min, Max, Product, Adasum = "Average", "Sum", "Min", "Max", "Product", "Adasum"
_REDUCTIONS = (Average, Sum, Min, Max, Product, Adasum)
_NO_GROUP = ("", 1)
_counting = threading.Lock()


@dataclass(slots=True)
class _Call:
    requests: list[Submission]
    negotiation: Negotiation
    grouped: bool = False


_calls: dict[int, _Call] = {}
_num_handles = 0


def poll(handle: int) -> bool:
    """Whether `synchronize` would return at once."""
    if handle not in _calls:
        raise ValueError(f"handle {handle!r} was not created here, or was synchronized before.")
    call = _calls[handle]
    return call.negotiation.poll(call.requests)


def synchronize(handle: int) -> Any:
    """Wait for a collective, and return its result; a list for a grouped one, a pair for an
    alltoall.

    The handle is used up: a second call returns `None`, as Horovod's does.

    Raises:
        HorovodInternalError: The collective failed, on all ranks.
        ValueError: There never was such a handle.
    """
    call = _calls.get(handle)
    if call is None:
        if isinstance(handle, int) and 0 <= handle < _num_handles:
            return None
        raise ValueError(f"handle {handle!r} was not created here.")
    for request in call.requests:
        if not request.done:
            call.negotiation.wait(call.requests)
            break
    del _calls[handle]
    for request in call.requests:
        if request.error is not None:
            raise HorovodInternalError(request.error) from request.cause
    results = [request.result for request in call.requests]
    return results if call.grouped else results[0]


def reduction(average: bool | None, op: str | None) -> str:
    """The operation that both arguments name. Average by default."""
    if average is not None and op is not None:
        raise ValueError("The op parameter supersedes average; only one of the two may be given.")
    chosen = op if op is not None else Sum if average is False else Average
    if chosen not in _REDUCTIONS:
        raise ValueError(f"op={chosen!r} is unknown, expected one of {', '.join(_REDUCTIONS)}.")
    return chosen


def start(
    kind: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    *,
    outputs: Sequence[Tensor] | None = None,
    grouped: bool = False,
    op: str = "",
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
    splits: tuple[int, ...] = (),
) -> int:
    """Submit one collective, or a group of them that runs together."""
    if not tensors:
        raise ValueError(f"a grouped {kind} got no tensors.")
    negotiation = process_set.negotiation
    if name is None:
        name = f"{UNNAMED}{next(negotiation.unnamed[kind])}"
    base = f"{kind}.{name}"
    group = (base, len(tensors)) if grouped else _NO_GROUP
    requests = []
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor) or tensor.is_meta:
            found = (
                "a tensor without values (device='meta')"
                if isinstance(tensor, Tensor)
                else repr(type(tensor))
            )
            raise ValueError(f"{base}: found {found}, expected a torch.Tensor with values.")
        if tensor.is_conj() or tensor.is_neg():
            if outputs is not None:
                raise ValueError(
                    f"{base}: a conjugated view cannot be written in place. Use "
                    "tensor.resolve_conj()."
                )
            tensor = tensor.resolve_conj().resolve_neg()
        if tensor.dtype == torch.bool and op in (Average, Sum):
            raise ValueError(
                f"{base}: op={op} got a tensor of torch.bool. Use op=Max (any), "
                "op=Min (all), or .int()."
            )
        if tensor.is_sparse:
            raise ValueError(
                f"{base}: a sparse tensor was given. Use sparse_allreduce_async, or "
                "tensor.to_dense()."
            )
        if not tensor.is_cpu and is_gpu(tensor.device):
            # another thread reads it
            gpu_module(tensor.device).current_stream(tensor.device).synchronize()
        if outputs is not None and not tensor.is_contiguous() and _overlaps(tensor):
            raise ValueError(
                f"{base}: an expanded tensor cannot be written in place. Use tensor.contiguous()."
            )
        own = f"{base}[{index}]" if grouped else base
        device = "cpu" if tensor.is_cpu else tensor.device.type
        described = Meta(
            kind, tensor.dtype, tensor.shape, op, prescale, postscale, root, splits, device, group
        )
        output = outputs[index] if outputs is not None else None
        requests.append(Submission(own, described, tensor, output))
    return _submit(negotiation, requests, grouped=grouped)


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory, as in an expanded tensor."""
    return any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _submit(negotiation: Negotiation, requests: list[Submission], *, grouped: bool = False) -> int:
    negotiation.submit(requests)
    global _num_handles
    with _counting:
        handle = _num_handles
        _num_handles += 1
    _calls[handle] = _Call(requests, negotiation, grouped)
    return handle


def start_reduction(
    kind: str,
    tensors: Sequence[Tensor],
    name: str | None,
    op: str,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    *,
    in_place: bool = False,
    grouped: bool = False,
) -> int:
    if op == Adasum:
        check_adasum(tensors, process_set)
    return start(
        kind,
        tensors,
        name,
        process_set,
        outputs=tensors if in_place else None,
        grouped=grouped,
        op=op,
        prescale=float(prescale_factor),
        postscale=float(postscale_factor),
    )


def check_adasum(tensors: Sequence[Tensor], process_set: ProcessSet) -> None:
    """Raise an error, the same on every rank, where ``op=Adasum`` cannot work."""
    if (num_ranks := process_set.size()) & (num_ranks - 1):
        raise NotImplementedError(
            "op=Adasum combines ranks in pairs and needs a power of two of them; there are "
            f"{num_ranks}. Use op=Average, or a process set of 2, 4, 8, ... ranks."
        )
    for tensor in tensors:
        if tensor.dtype not in ADASUM_DTYPES:
            raise ValueError(
                f"op=Adasum got a tensor of {tensor.dtype}, expected floating point. Use op=Sum."
            )


def start_broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    *,
    in_place: bool = False,
) -> int:
    if root_rank not in process_set.ranks:
        raise ValueError(
            f"broadcast got root_rank={root_rank}, which is not one of the ranks "
            f"{process_set.ranks}."
        )
    root = process_set.ranks.index(root_rank)
    return start(
        "broadcast", [tensor], name, process_set, outputs=[tensor] if in_place else None, root=root
    )


def start_alltoall(
    tensor: Tensor, splits: Tensor | None, name: str | None, process_set: ProcessSet
) -> int:
    return start(
        "alltoall",
        [tensor],
        name,
        process_set,
        splits=checked_splits(tensor, splits, process_set.size()),
    )


def checked_splits(
    tensor: Tensor, splits: Tensor | Sequence[int] | None, size: int
) -> tuple[int, ...]:
    if tensor.dim() == 0:
        raise ValueError(
            "alltoall got a tensor without dimensions; rows of the first dimension are sent."
        )
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(
                f"alltoall got {rows} rows and no splits; {rows} is not a multiple of {size} ranks."
            )
        return (rows // size,) * size
    given = torch.as_tensor(splits)
    if given.dtype not in (torch.int32, torch.int64) or (
        isinstance(splits, Tensor) and given.dtype != torch.int32
    ):
        raise ValueError(f"alltoall got splits of {given.dtype}, expected torch.int32.")
    numbers = tuple(int(number) for number in given.tolist())
    if len(numbers) != size or min(numbers, default=0) < 0 or sum(numbers) > rows:
        raise ValueError(
            f"alltoall got splits {list(numbers)} for {rows} rows and {size} ranks, expected "
            f"{size} numbers of rows whose sum is at most {rows}."
        )
    return numbers


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the process set is here."""
    request = Submission("barrier", Meta("barrier"))
    synchronize(_submit(process_set.negotiation, [request]))


def join(device: int = -1) -> int:
    """This rank has no more data: it takes part with zeros in the others' all-reduces until every
    rank has joined.

    So it does in those of `DistributedOptimizer`. Averages still divide by all ranks. Returns the
    rank that joined last, whose parameters have made all steps: `broadcast_parameters` from there.
    ``device`` is not needed here.
    """
    return global_process_set.negotiation.join()
