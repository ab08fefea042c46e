"""Gradients that travel as low-rank factors, with error feedback: PowerSGD.

Source: Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for
    distributed optimization"
(2019), arXiv:1905.13727, algorithms 1 and 2. torch's `powerSGD_hook` speaks to a torch process
group and reshapes contiguous gradients only; this speaks to any `Communicator` and takes matrices
as they lie in memory.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lightning_ring.comm.communicator import ChainedWork, Communicator, ReduceOp, Work
from lightning_ring.errors import check_arguments
from lightning_ring.gradients.compression.compressor import Compressor, GradientLayout, counterpart
from lightning_ring.gradients.compression.error_feedback import ErrorFeedback, replace_if, restore

log = logging.getLogger(__name__)

_GRAM_SCHMIDT_RANK = 4  # beyond it `torch.linalg.qr`, a call a matrix on GPUs, is worth its time


@dataclass(slots=True)
class Matrix:
    """One gradient, n × m, with the factors P (n × r) and Q (m × r) that travel for it.

    ``q`` is the same on every rank and starts the next power iteration.
    """

    name: str
    gradient: Tensor
    p: Tensor
    q: Tensor
    drawn: Tensor  # the random Q it starts from, and starts from again after an overflow


@dataclass(slots=True)
class Plan:
    """The two messages of a flat tensor of gradients: ``matrices`` travel as factors, the ``rest``
    as it is.

    ``first`` holds all P and then the rest, ``second`` all Q. Matrices of one shape lie side by
    side: ``ps`` and ``qs`` are views of their factors as batches, and ``noise`` is for
    `orthonormal`.
    """

    names: list[str]
    matrices: list[Matrix]
    ps: list[Tensor]
    qs: list[Tensor]
    noise: Tensor
    rest: list[Tensor]
    sent: list[Tensor]  # the rest's places in the first message
    first: Tensor
    second: Tensor


def orthonormal(factors: Tensor, noise: Tensor) -> Tensor:
    """Columns that span the same space, for each n × r matrix of a batch; where that has fewer
    dimensions, such as for zeros, some of the rest too.

    Up to rank 4 by Gram-Schmidt, whose few operations serve the whole batch, in float64: float32
    products may be rounded to TensorFloat-32. Each column is projected twice, which makes it
    orthogonal to rounding. In between ``noise``, n · r random numbers or more, of the size of a
    rounding gives a direction to columns that have lost theirs.

    Source: Giraud, Langou, Rozložník and van den Eshof, "Rounding error analysis of the classical
    Gram-Schmidt orthogonalization process" (2005).
    """
    _, n, r = factors.shape
    if r > _GRAM_SCHMIDT_RANK:
        return torch.linalg.qr(factors).Q
    columns = factors / _sizes(factors.double())
    share = torch.finfo(factors.dtype).eps / math.sqrt(n)
    directions = noise[: n * r].view(n, r, 1)
    for index in range(r):
        column, before = columns[:, :, index : index + 1], columns[:, :, :index]
        if index:
            column -= before @ (before.mT @ column)
        column.add_(directions[:, index], alpha=share)
        if index:
            column -= before @ (before.mT @ column)
        column /= _sizes(column)
    return columns.to(factors.dtype)


def _sizes(columns: Tensor) -> Tensor:
    """Norms of columns, and no zeros."""
    sizes = torch.linalg.vector_norm(columns, dim=1, keepdim=True)
    return sizes.clamp_min_(torch.finfo(sizes.dtype).tiny)


def batches(parts: Sequence[Tensor]) -> list[Tensor]:
    """``parts``, which lie side by side in memory, with a batch of those that follow each other
    and have one shape.
    """
    found = []
    for shape, same in groupby(parts, lambda part: part.shape):
        first, *others = same
        found.append(first.as_strided((1 + len(others), *shape), (first.numel(), *first.stride())))
    return found


def as_matrix(flat: Tensor, view: Tensor) -> Tensor:
    """The dense ``view`` of ``flat`` as a matrix without moving anything: a row for each index of
    the dimension that varies slowest.

    For a weight, contiguous or channels-last, those are its outputs.
    """
    strides = [
        (stride, size) for stride, size in zip(view.stride(), view.size(), strict=True) if size > 1
    ]
    _, rows = max(strides, default=(1, 1))
    start = view.storage_offset() - flat.storage_offset()
    return flat[start : start + view.numel()].view(rows, view.numel() // rows)


def side_by_side(parts: Sequence[Tensor], like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Copies of ``parts`` in one new vector, and views of the copies."""
    flat = like.new_zeros(sum(part.numel() for part in parts))
    views, start = [], 0
    for part in parts:
        views.append(flat[start : start + part.numel()].view_as(part).copy_(part))
        start += part.numel()
    return flat, views


class LowRank(Compressor):
    """Every matrix as two thin factors, found by one step of power iteration a backward (algorithm
    1).

    Replicas hold the same bits where they multiply matrices alike: on the same kind of processor,
    with as many threads. The arguments are those of `PowerSGD`.

    Raises:
        ConfigurationError: An argument cannot work.
    """

    name = "powersgd"

    def __init__(
        self, rank: int, start_iter: int, min_compression: float = 2.0, seed: int = 0
    ) -> None:
        check_arguments(
            "PowerSGD",
            rank >= 1 and start_iter >= 0 and min_compression >= 1,
            "a rank of 1 or more, 0 or more passes, and a ratio of at least 1",
            rank=rank,
            start_iter=start_iter,
            min_compression=min_compression,
        )
        self.rank = rank
        self.start_iter = start_iter
        self.min_compression = min_compression
        self.seed = seed
        self.num_backwards = 0
        self._plans: dict[Tensor, Plan] = {}
        self._qs: dict[str, Tensor] = {}  # by the parameter's name

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.float64)

    def is_lossy(self) -> bool:
        return self.num_backwards > self.start_iter

    def prepare(self, flat: Tensor, layout: GradientLayout) -> None:
        """Plan ``flat``. The Q of its parameters survive buckets that are built anew."""
        matrices, rest = [], []
        for name, view in zip(layout.names, layout.views, strict=True):
            gradient = as_matrix(flat, view)
            n, m = gradient.shape
            columns = min(n, m, self.rank)
            if (n + m) * columns * self.min_compression < n * m:
                drawn = self._draw(name, gradient, columns)
                p = gradient.new_zeros(n, columns)
                matrices.append(Matrix(name, gradient, p, drawn, drawn))
            else:
                rest.append(gradient.view(-1))
        matrices.sort(key=lambda matrix: matrix.gradient.shape)
        first, views = side_by_side([*(m.p for m in matrices), *rest], like=flat)
        second, qs = side_by_side([m.q for m in matrices], like=flat)
        ps, sent = views[: len(matrices)], views[len(matrices) :]
        for matrix, p, q in zip(matrices, ps, qs, strict=True):
            restore(q, self._qs.get(matrix.name))
            matrix.p, matrix.q = p, q
            self._qs[matrix.name] = q
        most = max((part.numel() for part in (*ps, *qs)), default=0)
        generator = torch.Generator().manual_seed(self.seed)
        # uniform: the first ones are the same in every bucket
        noise = (2 * torch.rand(most, generator=generator, dtype=flat.dtype) - 1).to(flat)
        names = list(layout.names)
        # a bucket has moved to other memory
        self._plans = {other: plan for other, plan in self._plans.items() if plan.names != names}
        self._plans[flat] = Plan(
            names, matrices, batches(ps), batches(qs), noise, rest, sent, first, second
        )

    def forget_tensors(self) -> None:
        self._plans.clear()

    def begin_backward(self) -> None:
        self.num_backwards += 1
        if self.num_backwards == self.start_iter + 1:
            matrices = [matrix for plan in self._plans.values() for matrix in plan.matrices]
            log.info(
                "lightning_ring: PowerSGD of rank %d from now on: %d gradients of %d elements in "
                "all travel as %d.",
                self.rank,
                len(matrices),
                sum(m.gradient.numel() for m in matrices),
                sum(m.p.numel() + m.q.numel() for m in matrices),
            )

    def all_reduce(
        self, flat: Tensor, comm: Communicator, *, lost: Tensor | None = None, name: str = ""
    ) -> Work:
        plan = self._plans[flat]
        if not self.is_lossy() or not plan.matrices:
            if lost is not None:
                lost.zero_()
            return comm.all_reduce_(flat, op=ReduceOp.AVG, name=name)
        qs = [q for batch in plan.qs for q in orthonormal(batch, plan.noise)]
        for matrix, q in zip(plan.matrices, qs, strict=True):
            torch.mm(matrix.gradient, q, out=matrix.p)
        if plan.rest:
            torch._foreach_copy_(plan.sent, plan.rest)
        work = comm.all_reduce_(plan.first, op=ReduceOp.AVG, name=name)
        return ChainedWork(
            work,
            lambda: _send_second(plan, comm, name),
            lambda: _decompress(plan, flat, lost),
        )

    def state_dict(self, comm: Communicator) -> dict[str, Any]:
        factors = {name: comm.read(q).clone() for name, q in self._qs.items()}
        return {"num_backwards": self.num_backwards, "rank": self.rank, "q": factors}

    def load_state_dict(self, state: dict[str, Any], rank: int, world_size: int) -> str | None:
        self.num_backwards = state["num_backwards"]
        if state["rank"] != self.rank:
            return (
                f"the checkpoint holds factors of rank {state['rank']}, not {self.rank}: they "
                "start at random ones."
            )
        for name, q in state["q"].items():
            restore(self._qs.setdefault(name, q), q)
        return None

    def _draw(self, name: str, gradient: Tensor, columns: int) -> Tensor:
        """By name: the same on every rank and in every order of buckets."""
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + self.seed)
        size = gradient.shape[1], columns
        return torch.randn(size, generator=generator, dtype=gradient.dtype).to(gradient)


class PowerSGD(ErrorFeedback):
    """``compression="powersgd"``: `LowRank` with error feedback (algorithm 2).

    Args:
        rank: Columns of the factors: 1 to 4 as a rule. More cost more and lose less.
        start_iter: Backward passes whose gradients travel whole before the first compressed one.
            torch's hook has this default and advises a tenth of all steps, the warm-up included.
        min_compression: A gradient whose factors have not this many times fewer elements travels as
            it is; so do vectors.
        seed: Of the first Q.

    Raises:
        ConfigurationError: An argument cannot work.
    """

    def __init__(
        self, rank: int = 2, start_iter: int = 1000, min_compression: float = 2.0, seed: int = 0
    ) -> None:
        super().__init__(LowRank(rank, start_iter, min_compression, seed))


def _send_second(plan: Plan, comm: Communicator, name: str) -> None:
    if plan.rest:
        torch._foreach_copy_(plan.rest, plan.sent)
    for batch in plan.ps:
        batch.copy_(orthonormal(batch, plan.noise))
    for matrix in plan.matrices:
        torch.mm(matrix.gradient.t(), matrix.p, out=matrix.q)
    comm.all_reduce_(plan.second, op=ReduceOp.AVG, name=f"{name}, second factors").wait()


def _decompress(plan: Plan, flat: Tensor, lost: Tensor | None) -> None:
    """Put the product of the factors into ``flat``, and the rest of this rank's gradients
    into ``lost``. If sums are not finite, a loss scaler skips this step: it has not been taken.
    """
    finite = plan.second.sum().isfinite()
    for matrix in plan.matrices:
        product = torch.mm(matrix.p, matrix.q.t())
        if lost is not None:
            error = counterpart(lost, flat, matrix.gradient)
            replace_if(finite, [(error, matrix.gradient.sub_(product))])
        matrix.gradient.copy_(product)
        nan = flat.new_full((), torch.nan)
        replace_if(~finite, [(matrix.gradient, nan), (matrix.q, matrix.drawn)])
    if lost is not None:
        zero = flat.new_zeros(())
        replace_if(finite, [(counterpart(lost, flat, part), zero) for part in plan.rest])
