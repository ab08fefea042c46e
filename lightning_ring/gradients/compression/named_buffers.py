"""State of a compressor beside each flat tensor that it sends, which belongs to the parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.host_copy import on_host
from lightning_ring.gradients.compression.compressor import GradientLayout


class NamedBuffers:
    """A buffer, zero at first, for each flat tensor of `Compressor.prepare`.

    Contents are kept by the parameters' names, survive buckets that are built anew, and go into
    checkpoints.
    """

    def __init__(self) -> None:
        # by the flat tensor that is sent
        self._buffers: dict[Tensor, tuple[Tensor, GradientLayout]] = {}
        self._views: dict[str, Tensor] = {}
        self._loaded: dict[str, Tensor] = {}

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
            place = buffer.as_strided(
                view.size(), view.stride(), view.storage_offset() - flat.storage_offset()
            )
            _restore(place, self._views.get(name))
            _restore(place, self._loaded.pop(name, None))
            self._views[name] = place
        replaced = set(layout.names)
        self._buffers = {
            other: kept
            for other, kept in self._buffers.items()
            if replaced.isdisjoint(kept[1].names)
        }
        self._buffers[flat] = buffer, layout

    def forget_tensors(self) -> None:
        self._buffers.clear()  # by parameter they stay

    def zero_(self) -> None:
        for view in self._views.values():
            view.zero_()

    def before(self, flat: Tensor) -> dict[int, Tensor]:
        """Copies of the contents for parameters without a gradient on this rank, by their index
        in the layout.
        """
        layout = self.layout(flat)
        return {
            index: self._views[name].clone()
            for index, (name, contributed) in enumerate(
                zip(layout.names, layout.contributed, strict=True)
            )
            if not contributed
        }

    def keep_unused(self, flat: Tensor, before: dict[int, Tensor]) -> None:
        """Restore the contents for parameters without a gradient on any rank: nothing is handed
        to them.
        """
        layout = self.layout(flat)
        for index, earlier in before.items():  # the host waits for no device
            view = self._views[layout.names[index]]
            view.copy_(torch.where(layout.used[index] > 0, view, earlier))

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

    def load(self, state: dict[str, Tensor]) -> None:
        """Continue from this rank's part of `state`, before or after `prepare`."""
        self._loaded = dict(state)
        for name in self._views.keys() & self._loaded.keys():
            _restore(self._views[name], self._loaded.pop(name))


def keep_if_finite(average: Tensor, updates: list[tuple[Tensor, Tensor]]) -> None:
    """Give each first tensor the second one's values, unless ``average`` holds inf or NaN: its
    step is then skipped.
    """
    if not updates:
        return
    finite = average.sum().isfinite()
    if not on_host(average):  # to ask would make the host wait
        for place, value in updates:
            torch.where(finite, value, place, out=place)
    elif finite:
        for place, value in updates:
            place.copy_(value)


def _restore(place: Tensor, earlier: Tensor | None) -> None:
    if earlier is not None and earlier.shape == place.shape:
        place.copy_(earlier)
