"""Error feedback: the part of a gradient that a compressor loses is added to the next gradient.

Sources: Seide, Fu, Droppo, Li and Yu, "1-bit stochastic gradient descent and its application to data-parallel
distributed training of speech DNNs" (2014); Karimireddy, Rebjock, Stich and Jaggi, "Error feedback fixes SignSGD and
other gradient compression schemes" (2019), arXiv:1901.09847, algorithm 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ring.comm.communicator import ChainedWork, Communicator, Work
from lightning_ring.comm.host_copy import on_host
from lightning_ring.gradients.compression.compressor import Compressor, GradientLayout


class ErrorFeedback(Compressor):
    """``compressor`` with a residual e of each gradient g on each rank: p = g + e is sent, and e = p − sent is kept.

    Residuals are kept by the parameters' names, survive buckets that are built anew, and go into checkpoints. One of a
    gradient that no rank has in a backward stays as it is. Under a loss scaler they keep the scale of their step.
    """

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self.name = compressor.name
        self._residuals: dict[Tensor, tuple[Tensor, GradientLayout]] = {}  # by the flat tensor that is sent
        self._views: dict[str, Tensor] = {}  # the residual of each gradient
        self._loaded: dict[str, Tensor] = {}

    def residual(self, name: str) -> Tensor:
        """This rank's residual of the parameter ``name``, with its shape."""
        return self._views[name]

    def accepts(self, dtype: torch.dtype) -> bool:
        return self.compressor.accepts(dtype)

    def wire_bytes(self, numel: int, world_size: int) -> float | None:
        return self.compressor.wire_bytes(numel, world_size)

    def is_lossy(self) -> bool:
        return self.compressor.is_lossy()

    def prepare(self, flat: Tensor, layout: GradientLayout) -> None:
        residual = torch.zeros_like(flat)
        for name, view in zip(layout.names, layout.views, strict=True):
            place = residual.as_strided(view.size(), view.stride(), view.storage_offset() - flat.storage_offset())
            self._restore(place, self._views.get(name))
            self._restore(place, self._loaded.pop(name, None))
            self._views[name] = place
        replaced = set(layout.names)
        self._residuals = {other: kept for other, kept in self._residuals.items() if replaced.isdisjoint(kept[1].names)}
        self._residuals[flat] = residual, layout
        self.compressor.prepare(flat, layout)

    def forget_tensors(self) -> None:
        self._residuals.clear()  # by parameter they stay
        self.compressor.forget_tensors()

    def begin_backward(self) -> None:
        self.compressor.begin_backward()

    def all_reduce(self, flat: Tensor, comm: Communicator, *, lost: Tensor | None = None, name: str = "") -> Work:
        if not self.is_lossy():
            return self.compressor.all_reduce(flat, comm, name=name)
        residual, layout = self._residuals[flat]
        absent = {
            index: self._views[parameter].clone()
            for index, (parameter, contributed) in enumerate(zip(layout.names, layout.contributed, strict=True))
            if not contributed
        }
        flat.add_(residual)
        if self.compressor.buffer_dtype is None:
            work = self.compressor.all_reduce(flat, comm, lost=residual, name=name)
        else:
            work = self._all_reduce_converted(flat, residual, self.compressor.buffer_dtype, comm, name)
        return ChainedWork(work, lambda: self._keep_unused(absent, layout)) if absent else work

    def state_dict(self, comm: Communicator) -> dict[str, Any]:
        """Every rank's residuals, on rank 0 only: for N ranks up to N times the model's bytes."""
        errors: list[dict[str, Tensor]] = [{} for _ in range(comm.world_size)]
        for name, residual in sorted(self._views.items()):
            for rank, error in enumerate(comm.all_gather(residual, name=f"residual of {name}")):
                if comm.rank == 0:
                    errors[rank][name] = comm.read(error)
        return {"errors": errors, "compressor": self.compressor.state_dict(comm)}

    def load_state_dict(self, state: dict[str, Any], rank: int, world_size: int) -> str | None:
        if not state:
            return f"the checkpoint holds no state of {self.name}, which starts anew, with residuals of zero."
        problem = self.compressor.load_state_dict(state["compressor"], rank, world_size)
        if len(state["errors"]) != world_size:
            return (
                f"the checkpoint holds the {self.name} residuals of {len(state['errors'])} ranks, and this job has "
                f"{world_size} ranks. They start again at zero: what the steps before the checkpoint left out of the "
                f"gradients is lost. {problem or ''}".rstrip()
            )
        self._loaded = dict(state["errors"][rank])
        for name in self._views.keys() & self._loaded.keys():
            self._restore(self._views[name], self._loaded.pop(name))
        return problem

    def _all_reduce_converted(
        self, flat: Tensor, residual: Tensor, dtype: torch.dtype, comm: Communicator, name: str
    ) -> Work:
        buffer = flat.to(dtype)

        def arrived() -> None:
            finite = buffer.sum(dtype=flat.dtype).isfinite()
            if not on_host(flat):
                torch.where(finite, flat - flat.to(dtype), residual, out=residual)
            elif finite:
                torch.sub(flat, flat.to(dtype), out=residual)
            flat.copy_(buffer)

        return ChainedWork(self.compressor.all_reduce(buffer, comm, name=name), arrived)

    def _keep_unused(self, absent: dict[int, Tensor], layout: GradientLayout) -> None:
        """What arrived for a gradient that no rank has is dropped: its residual is still owed."""
        for index, residual in absent.items():  # the host waits for no device
            view = self._views[layout.names[index]]
            view.copy_(torch.where(layout.used[index] > 0, view, residual))

    @staticmethod
    def _restore(residual: Tensor, earlier: Tensor | None) -> None:
        if earlier is not None and earlier.shape == residual.shape:
            residual.copy_(earlier)
