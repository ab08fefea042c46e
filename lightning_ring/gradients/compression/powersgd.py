"""Gradients that travel as low-rank factors, with what that loses added to the next ones: PowerSGD.

Source: Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization"
(2019), arXiv:1905.13727, algorithms 1 and 2. torch's `powerSGD_hook` speaks to a torch process group and reshapes
contiguous gradients only; this speaks to any `Communicator` and takes matrices as they lie in memory.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ring.comm.communicator import Communicator, ReduceOp, Work
from lightning_ring.errors import ConfigurationError
from lightning_ring.gradients.bucket import Bucket
from lightning_ring.gradients.compression.compressor import Compressor
from lightning_ring.gradients.compression.low_rank import (
    Matrix,
    Plan,
    as_matrix,
    in_memory_order,
    orthonormal,
    side_by_side,
)

log = logging.getLogger(__name__)


class PowerSGD(Compressor):
    """``compression="powersgd"``: every matrix as two thin ones, found by one step of power iteration a backward.

    Replicas hold the same bits where they multiply matrices alike: on the same kind of processor, with as many threads.
    Under a loss scaler the error keeps the scale of the step it is from.

    Args:
        rank: Columns of the factors: 1 to 4 as a rule. More cost more and lose less.
        start_iter: Backward passes whose gradients travel whole before the first compressed one. torch's hook has this
            default and advises a tenth of all steps, the warm-up included.
        min_compression: A gradient whose factors have not this many times fewer elements travels as it is; so do
            vectors.
        seed: Of the first Q.

    Raises:
        ConfigurationError: An argument cannot work.
    """

    def __init__(self, rank: int = 2, start_iter: int = 1000, min_compression: float = 2.0, seed: int = 0) -> None:
        if rank < 1 or start_iter < 0 or min_compression < 1:
            raise ConfigurationError(
                f"PowerSGD got rank={rank}, start_iter={start_iter}, min_compression={min_compression}; expected a "
                "rank of 1 or more, 0 or more passes, and a ratio of at least 1."
            )
        self.name = "powersgd"
        self.rank = rank
        self.start_iter = start_iter
        self.min_compression = min_compression
        self.seed = seed
        self.num_backwards = 0
        self._plans: dict[Bucket, Plan] = {}
        self._matrices: dict[str, Matrix] = {}
        self._loaded: dict[str, tuple[Tensor, Tensor]] = {}

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.float64)

    def prepare(self, bucket: Bucket) -> None:
        """Plan ``bucket``. What its parameters remember survives buckets that are built anew."""
        matrices, indices, rest = [], [], []
        for index, (name, view) in enumerate(zip(bucket.names, bucket.views, strict=True)):
            gradient = as_matrix(bucket.flat, view)
            if self._pays(gradient):
                matrices.append(self._remember(name, gradient))
                indices.append(index)
            else:
                rest.append(in_memory_order(bucket.flat, view))
        rest += [bucket.used, bucket.stop]
        first, ps = side_by_side([m.p for m in matrices], sum(part.numel() for part in rest), like=bucket.flat)
        second, qs = side_by_side([m.q for m in matrices], 0, like=bucket.flat)
        for matrix, p, q in zip(matrices, ps, qs, strict=True):
            matrix.p, matrix.q = p, q
        taken = set(bucket.names)
        self._plans = {other: plan for other, plan in self._plans.items() if taken.isdisjoint(other.names)}
        self._plans[bucket] = Plan(matrices, indices, rest, first, second)

    def begin_backward(self) -> None:
        self.num_backwards += 1
        if self.num_backwards == self.start_iter + 1:
            whole = sum(m.gradient.numel() for m in self._matrices.values())
            factors = sum(m.p.numel() + m.q.numel() for m in self._matrices.values())
            log.info(
                "lightning_ring: PowerSGD of rank %d from now on: %d gradients of %d elements in all travel as %d.",
                self.rank,
                len(self._matrices),
                whole,
                factors,
            )

    def all_reduce(self, bucket: Bucket, comm: Communicator, *, divisor: int, name: str) -> Work:
        factor = comm.world_size / divisor
        plan = self._plans[bucket]
        if self.num_backwards <= self.start_iter or not plan.matrices:
            work = comm.all_reduce_(bucket.flat, op=ReduceOp.AVG, name=name)
            return _Steps([work.wait, lambda: _scale(bucket.flat, factor)])
        for matrix in plan.matrices:
            matrix.gradient.add_(matrix.error)
            torch.mm(matrix.gradient, orthonormal(matrix.q), out=matrix.p)
        rest = plan.first[plan.first.numel() - sum(part.numel() for part in plan.rest) :]
        torch.cat([part.reshape(-1) for part in plan.rest], out=rest)
        work = comm.all_reduce_(plan.first, op=ReduceOp.AVG, name=name)
        return _Steps(
            [
                work.wait,
                lambda: _put_back(rest, plan.rest),
                lambda: _send_second(plan, comm, name),
                lambda: self._decompress(bucket, plan),
                lambda: _scale(bucket.flat, factor),
            ]
        )

    def state_dict(self, comm: Communicator) -> dict[str, Any]:
        """Every Q once, and every rank's errors: for N ranks up to N times the model's bytes, on rank 0 only."""
        errors: list[dict[str, Tensor]] = [{} for _ in range(comm.world_size)]
        for name, matrix in sorted(self._matrices.items()):
            for rank, error in enumerate(comm.all_gather(matrix.error, name=f"error of {name}")):
                if comm.rank == 0:
                    errors[rank][name] = error.cpu()
        factors = {name: matrix.q.cpu().clone() for name, matrix in self._matrices.items()}
        return {"num_backwards": self.num_backwards, "rank": self.rank, "q": factors, "errors": errors}

    def load_state_dict(self, state: dict[str, Any], rank: int, world_size: int) -> str | None:
        if not state:
            return "the checkpoint holds no state of PowerSGD; its errors start at zero, and its first passes anew."
        self.num_backwards = state["num_backwards"]
        if len(state["errors"]) != world_size or state["rank"] != self.rank:
            return (
                f"the checkpoint holds PowerSGD's errors of {len(state['errors'])} ranks with factors of rank "
                f"{state['rank']}; this job has {world_size} ranks and rank {self.rank}. They start again at zero: "
                "what the steps before the checkpoint left out of the gradients is lost."
            )
        self._loaded = {name: (q, state["errors"][rank][name]) for name, q in state["q"].items()}
        for name, matrix in self._matrices.items():
            self._restore(name, matrix)
        return None

    def _pays(self, gradient: Tensor) -> bool:
        n, m = gradient.shape
        return (n + m) * min(n, m, self.rank) * self.min_compression < n * m

    def _remember(self, name: str, gradient: Tensor) -> Matrix:
        known = self._matrices.get(name)
        if known is not None and all(
            getattr(known.gradient, same) == getattr(gradient, same) for same in ("shape", "dtype", "device")
        ):
            known.gradient = gradient
            return known
        n, m = gradient.shape
        columns = min(n, m, self.rank)
        factors = gradient.new_zeros(n, columns), gradient.new_zeros(m, columns)
        matrix = Matrix(name, gradient, *factors, error=torch.zeros_like(gradient))
        self._matrices[name] = matrix
        self._draw(matrix)
        self._restore(name, matrix)
        return matrix

    def _draw(self, matrix: Matrix) -> None:
        # by name: the same on every rank and in every order of buckets
        generator = torch.Generator().manual_seed(zlib.crc32(matrix.name.encode()) + self.seed)
        matrix.q.copy_(torch.randn(matrix.q.shape, generator=generator, dtype=matrix.q.dtype))

    def _decompress(self, bucket: Bucket, plan: Plan) -> None:
        """Put what was sent into the bucket, and what was not into the errors."""
        if not plan.second.sum().isfinite():  # a loss scaler will skip this step: it has not been taken
            for matrix in plan.matrices:
                matrix.gradient.fill_(torch.nan)
                self._draw(matrix)
            return
        used = None if all(bucket.contributed) else bucket.used.tolist()
        for index, matrix in zip(plan.indices, plan.matrices, strict=True):
            if used is not None and used[index] <= 0:
                continue  # nobody gets this gradient, so the error is still owed
            matrix.error.copy_(matrix.gradient)
            torch.mm(matrix.p, matrix.q.t(), out=matrix.gradient)
            matrix.error.sub_(matrix.gradient)

    def _restore(self, name: str, matrix: Matrix) -> None:
        q, error = self._loaded.pop(name, (None, None))
        if q is not None and error is not None and error.shape == matrix.error.shape:
            matrix.q.copy_(q)
            matrix.error.copy_(error)


class _Steps:
    """A `Work` that is made of ``steps``, taken in the thread that waits: the second message needs the first."""

    __slots__ = ("_steps",)

    def __init__(self, steps: Sequence[Callable[[], object]]) -> None:
        self._steps = list(steps)

    def wait(self) -> None:
        while self._steps:
            self._steps[0]()
            self._steps.pop(0)

    def done(self) -> bool:
        return not self._steps


def _send_second(plan: Plan, comm: Communicator, name: str) -> None:
    for matrix in plan.matrices:
        matrix.p.copy_(orthonormal(matrix.p))
        torch.mm(matrix.gradient.t(), matrix.p, out=matrix.q)
    comm.all_reduce_(plan.second, op=ReduceOp.AVG, name=f"{name}, second factors").wait()


def _put_back(flat: Tensor, parts: Sequence[Tensor]) -> None:
    for part, arrived in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.copy_(arrived)


def _scale(flat: Tensor, factor: float) -> None:
    if factor != 1:
        flat.mul_(factor)
