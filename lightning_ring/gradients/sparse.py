"""Sparse gradients (``nn.Embedding(sparse=True)``): ranks gather indices and values, and averages
stay sparse.

At the end of backward the ranks gather the number of entries, then indices and values, if those of
all ranks together are shorter than the parameter; otherwise one dense all-reduce carries them. Sums
are made rank by rank, so that all ranks hold the same bits. Only weights of embeddings that declare
it stay sparse, as under DistributedDataParallel; any other sparse gradient is sent dense, with one
warning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_ring.comm.communicator import Communicator
from lightning_ring.gradients.delivery import average_
from lightning_ring.host.accelerator import send

_ABSENT, _DENSE = -1, -2  # in place of a number of entries


def sparse_weights(module: nn.Module) -> set[Parameter]:
    """Weights of embeddings with ``sparse=True``: DistributedDataParallel finds sparse gradients
    the same way.
    """
    embeddings = (
        each for each in module.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag))
    )
    weights = (embedding.weight for embedding in embeddings if embedding.sparse)
    # a parametrisation computes it
    return {weight for weight in weights if isinstance(weight, Parameter)}


class SparseGradients:
    """Parameters whose gradients are averaged outside the buckets, because they may be sparse.

    These are the weights of embeddings with ``sparse=True`` (``declared`` returns them, the same on
    every rank). If not ``enabled``, all gradients stay in buckets, which make them dense.
    ``params`` has the name of each parameter, in the same order on all ranks.
    """

    def __init__(
        self, comm: Communicator, declared: Callable[[], set[Parameter]], *, enabled: bool
    ) -> None:
        self.params: dict[Parameter, str] = {}
        self._comm = comm
        self._declared = declared
        self._enabled = enabled

    def take(self, named: Sequence[tuple[str, Parameter]]) -> list[tuple[str, Parameter]]:
        """Add the declared parameters among ``named``; returns the others."""
        declared = self._declared() if self._enabled else set()
        self.params |= {param: name for name, param in named if param in declared}
        return [(name, param) for name, param in named if param not in declared]

    def travels_dense(self, name: str) -> str:
        """A parameter in a bucket got a sparse gradient: a message for the user."""
        if self._enabled:
            return (
                f"the gradient of {name} is sparse, which no nn.Embedding(sparse=True) declares. "
                "It travels dense, and reaches the optimizer dense."
            )
        return (
            f"the gradient of {name} is sparse. With the strategy `ring_sharded` it travels "
            "dense, and reaches the optimizer dense; with the strategy `ring` it stays sparse."
        )

    def average(
        self, fresh: set[Parameter], active_ranks: int | None, *, stop: bool, prefix: str
    ) -> bool:
        """Average ``param.grad`` of all ``params``. Returns whether some rank has ``stop``.
        Collective if not empty.

        Gradients of ``fresh`` parameters were computed since the last average; one that no rank has
        computed is kept.
        """
        if not self.params:
            return stop
        grads = {param: param.grad for param in self.params if param.grad is not None}
        return average_gradients(
            self.params, grads, fresh, self._comm, active_ranks, stop=stop, prefix=prefix
        )


@torch.no_grad()
def average_gradients(
    params: dict[Parameter, str],
    grads: dict[Parameter, Tensor],
    fresh: set[Parameter],
    comm: Communicator,
    active_ranks: int | None,
    *,
    stop: bool = False,
    prefix: str = "",
) -> bool:
    """Set ``.grad`` of ``params`` to the average of all ranks' ``grads``, the same bits on all
    ranks. Collective.

    Sparse if every rank's is sparse or absent, dense if some rank's is dense, unchanged if none is
    ``fresh``.
    """
    local = [grads.get(param) for param in params]
    local = [grad.coalesce() if grad is not None and grad.is_sparse else grad for grad in local]
    sizes = [(_size(grad), grad.sparse_dim() if grad is not None else 0) for grad in local]
    mine = [[*size, int(param in fresh)] for size, param in zip(sizes, params, strict=True)] + [
        [0, 0, int(stop)]
    ]
    table = send(torch.tensor(mine), next(iter(params)).device)
    # by rank and parameter: the three numbers; the last row has the request to stop
    by_rank = comm.read(
        torch.stack(comm.all_gather(table, name=f"{prefix}sizes of sparse gradients"))
    ).tolist()
    for index, (param, name) in enumerate(params.items()):
        rows = [rank[index] for rank in by_rank]
        if not any(is_fresh for _, _, is_fresh in rows):
            continue
        dims = {dim for size, dim, _ in rows if size != _ABSENT}
        if any(size == _DENSE for size, _, _ in rows) or len(dims) > 1:
            param.grad = _dense_average(
                local[index], param, comm, active_ranks, f"{prefix}dense gradient of {name}"
            )
            continue
        counts = [max(size, 0) for size, _, _ in rows]
        indexed = param.shape[: dims.pop()]
        what = f"{prefix}{{}} of the sparse gradient of {name}"
        param.grad = _sparse_average(local[index], param, indexed, counts, comm, active_ranks, what)
    return any(rank[-1][2] for rank in by_rank)


def _size(grad: Tensor | None) -> int:
    """Number of entries (rows of an embedding), or a constant for an absent or dense gradient."""
    if grad is None:
        return _ABSENT
    return int(grad._nnz()) if grad.is_sparse else _DENSE


def _dense_average(
    grad: Tensor | None, param: Parameter, comm: Communicator, active_ranks: int | None, name: str
) -> Tensor:
    flat = torch.zeros_like(param, memory_format=torch.contiguous_format)
    if grad is not None:
        flat.copy_(grad.to_dense() if grad.is_sparse else grad)
    average_(flat, comm, active_ranks, name).wait()
    return flat


def _sparse_average(
    grad: Tensor | None,
    param: Parameter,
    indexed: torch.Size,
    counts: Sequence[int],
    comm: Communicator,
    active_ranks: int | None,
    name: str,
) -> Tensor:
    """The average of the ranks' sparse gradients of ``param``, whose first dimensions ``indexed``
    have ``counts`` of entries on each rank.

    Ranks gather the indices, which are row-major numbers. If all ranks' values together are smaller
    than the parameter, ranks gather them too. Else they all-reduce one dense tensor, and take its
    indexed entries.
    """
    row = param.shape[len(indexed) :]
    length = row.numel()
    index = torch.empty(0, dtype=torch.int64, device=param.device)
    values = param.new_empty(0, length)
    if grad is not None:
        strides = [indexed[axis + 1 :].numel() for axis in range(len(indexed))]
        index = (grad.indices() * send(torch.tensor(strides), param.device).unsqueeze(1)).sum(0)
        values = grad.values().reshape(-1, length).to(param.dtype)
    indices = torch.cat(_gather(index, counts, comm, name.format("indices")))
    unique, inverse = torch.unique(indices, return_inverse=True)
    bytes_gathered = sum(counts) * (length * param.element_size() + index.element_size())
    if bytes_gathered <= param.nbytes:
        gathered = _gather(values, counts, comm, name.format("values"))
        # rank by rank, so that all get the same bits; divided first, as DistributedDataParallel
        wide = torch.promote_types(param.dtype, torch.float32)
        total = param.new_zeros(len(unique), length, dtype=wide)
        for theirs, position in zip(gathered, inverse.split(list(counts)), strict=True):
            # no index twice: a rank's entries are coalesced
            total.index_add_(0, position, theirs.to(wide) / (active_ranks or comm.world_size))
        total = total.to(param.dtype)
    else:
        flat = param.new_zeros(indexed.numel(), length)
        flat[index] = values
        average_(flat, comm, active_ranks, name.format("values")).wait()
        total = flat[unique]
    return torch.sparse_coo_tensor(
        torch.stack(torch.unravel_index(unique, indexed)),
        total.reshape(-1, *row),
        param.shape,
        is_coalesced=True,
        check_invariants=False,
    )


def _gather(mine: Tensor, counts: Sequence[int], comm: Communicator, name: str) -> list[Tensor]:
    """All ranks' tensors, which differ in the first dimension."""
    outputs = [mine.new_empty(count, *mine.shape[1:]) for count in counts]
    comm.all_to_all([mine.contiguous()] * len(counts), outputs, name=name).wait()
    return outputs
