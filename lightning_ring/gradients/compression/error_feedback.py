"""Error feedback: the part of a gradient that a compressor loses is added to the next gradient.

Sources: Seide, Fu, Droppo, Li and Yu, "1-bit stochastic gradient descent and its application to
    data-parallel
distributed training of speech DNNs" (2014); Karimireddy, Rebjock, Stich and Jaggi, "Error feedback
fixes SignSGD and other gradient compression schemes" (2019), arXiv:1901.09847, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ring.comm.communicator import ChainedWork, Communicator, Work
from lightning_ring.comm.host_copy import on_host
from lightning_ring.gradients.compression.compressor import Compressor, GradientLayout


class ErrorFeedback(Compressor):
    """``compressor`` with a residual e of each gradient g on each rank: p = g + e is sent, and e =
    p − sent is kept.

    Residuals are kept by the parameters' names, survive buckets that are built anew, and go into
    checkpoints. One of a gradient that no rank has in a backward stays as it is. Under a loss
    scaler they keep the scale of their step.
    """

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self.name = compressor.name
        self._residuals = NamedBuffers()
        self._parts: list[NamedBuffers | Compressor] = [self._residuals, compressor]

    def residual(self, name: str) -> Tensor:
        """This rank's residual of the parameter ``name``, with its shape."""
        return self._residuals.of_parameter(name)

    def accepts(self, dtype: torch.dtype) -> bool:
        return self.compressor.accepts(dtype)

    def is_lossy(self) -> bool:
        return self.compressor.is_lossy()

    def prepare(self, flat: Tensor, layout: GradientLayout) -> None:
        for part in self._parts:
            part.prepare(flat, layout)

    def forget_tensors(self) -> None:
        for part in self._parts:
            part.forget_tensors()

    def begin_backward(self) -> None:
        self.compressor.begin_backward()

    def start_again(self) -> None:
        for part in self._parts:
            part.start_again()

    def all_reduce(
        self, flat: Tensor, comm: Communicator, *, lost: Tensor | None = None, name: str = ""
    ) -> Work:
        if not self.is_lossy():
            return self.compressor.all_reduce(flat, comm, name=name)
        residual, keep_unused = self._residuals[flat], self._residuals.keep_unused(flat)
        flat.add_(residual)
        dtype = self.compressor.buffer_dtype
        if dtype is None:
            work = self.compressor.all_reduce(flat, comm, lost=residual, name=name)
            return ChainedWork(work, keep_unused)
        buffer = flat.to(dtype)

        def convert_back() -> None:
            error = flat - flat.to(dtype)
            flat.copy_(buffer)
            keep_if_finite(flat, [(residual, error)])

        work = self.compressor.all_reduce(buffer, comm, name=name)
        return ChainedWork(work, convert_back, keep_unused)

    def state_dict(self, comm: Communicator) -> dict[str, Any]:
        """Every rank's residuals, on rank 0 only: for N ranks up to N times the model's bytes."""
        return {
            "errors": self._residuals.state(comm, "residual"),
            "compressor": self.compressor.state_dict(comm),
        }

    def load_state_dict(self, state: dict[str, Any], rank: int, world_size: int) -> str | None:
        if "errors" not in state:
            return (
                f"the checkpoint holds no state of {self.name} with error feedback, which starts "
                "anew, with residuals of zero."
            )
        problem = self.compressor.load_state_dict(state["compressor"], rank, world_size)
        errors = state["errors"]
        if self._residuals.load(errors, rank, world_size):
            return problem
        lost = (
            f"the checkpoint holds the {self.name} residuals of {len(errors)} ranks, and this "
            f"job has {world_size} ranks. They start again at zero: what the steps before the "
            "checkpoint left out of the gradients is lost."
        )
        return f"{lost} {problem or ''}".rstrip()


class NamedBuffers:
    """A buffer, zero at first, for each flat tensor of `Compressor.prepare`.

    Contents are kept by the parameters' names, survive buckets that are built anew, and go into
    checkpoints.
    """

    def __init__(self) -> None:
        # by the flat tensor that is sent
        self._buffers: dict[Tensor, tuple[Tensor, GradientLayout]] = {}
        self._views: dict[str, Tensor] = {}

    def __getitem__(self, flat: Tensor) -> Tensor:
        return self._buffers[flat][0]

    def layout(self, flat: Tensor) -> GradientLayout:
        return self._buffers[flat][1]

    def of_parameter(self, name: str) -> Tensor:
        """A view of the buffer with the parameter's shape."""
        return self._views[name]

    def prepare(self, flat: Tensor, layout: GradientLayout) -> None:
        buffer = torch.zeros_like(flat)
        for name, view in zip(layout.names, layout.views, strict=True):
            start = view.storage_offset() - flat.storage_offset()
            place = buffer.as_strided(view.size(), view.stride(), start)
            restore(place, self._views.get(name))
            self._views[name] = place
        # a bucket has moved to other memory
        self._buffers = {
            other: kept for other, kept in self._buffers.items() if kept[1].names != layout.names
        }
        self._buffers[flat] = buffer, layout

    def forget_tensors(self) -> None:
        self._buffers.clear()  # by parameter they stay

    def start_again(self) -> None:
        for view in self._views.values():
            view.zero_()

    def keep_unused(self, flat: Tensor) -> Callable[[], None]:
        """Before a collective. Call the result after it: parameters without a gradient on any
        rank then have their contents of now, because nothing is handed to them.
        """
        layout = self.layout(flat)
        kept = [
            (index, self._views[name], self._views[name].clone())
            for index, name in enumerate(layout.names)
            if not layout.contributed[index]
        ]

        def restore_unused() -> None:
            for index, view, earlier in kept:  # the host waits for no device
                view.copy_(torch.where(layout.used[index] > 0, view, earlier))

        return restore_unused

    def state(self, comm: Communicator, what: str) -> list[dict[str, Tensor]]:
        """The contents on every rank, by rank and name; on rank 0 only, elsewhere empty.
        Collective.
        """
        states: list[dict[str, Tensor]] = [{} for _ in range(comm.world_size)]
        for name, view in sorted(self._views.items()):
            for rank, each in enumerate(comm.all_gather(view, name=f"{what} of {name}")):
                if comm.rank == 0:
                    states[rank][name] = comm.read(each)
        return states

    def load(self, states: Sequence[dict[str, Tensor]], rank: int, world_size: int) -> bool:
        """Continue from `state`, before or after `prepare`, unless it is of another number of
        ranks. Returns whether it did.
        """
        if len(states) != world_size:
            return False
        for name, earlier in states[rank].items():
            restore(self._views.setdefault(name, earlier), earlier)
        return True


def keep_if_finite(average: Tensor, updates: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give each first tensor the second one's values, unless ``average`` holds inf or NaN: its
    step is then skipped.
    """
    if updates:
        replace_if(average.sum().isfinite(), updates)


def replace_if(condition: Tensor, updates: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give each first tensor the second one's values if the 0-d ``condition`` holds."""
    if not on_host(condition):  # to ask would make the host wait
        for place, value in updates:
            torch.where(condition, value, place, out=place)
    elif condition:
        for place, value in updates:
            place.copy_(value)


def restore(place: Tensor, earlier: Tensor | None) -> None:
    """Give ``place`` the values of ``earlier``, if it is there and has that shape."""
    if earlier is not None and earlier.shape == place.shape:
        place.copy_(earlier)
