"""The scalars of one step: a float64 vector over all parameters for each name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ring.optim.engine.rule import Scalars


class StepNumbers:
    """Named vectors over all parameters, on the device and, where that costs no synchronization, as floats.

    Args:
        on_device: The vectors, where the step's sums and ratios live.
        on_host: The same vectors on the CPU, as far as they are known there.
    """

    def __init__(self, on_device: dict[str, Tensor], on_host: dict[str, Tensor]) -> None:
        self.on_device = on_device
        self._on_host = on_host
        self._lists: dict[str, list[float] | list[Tensor]] = {}
        self._uniform: dict[str, float] | None = None
        self._at: dict[int, Scalars] = {}
        self._fewer: StepNumbers | None = None  # what these numbers extend
        self._all_on_host = on_host.keys() == on_device.keys()

    def values(self, name: str) -> list[float] | list[Tensor]:
        """One float for each parameter, or one 0-d tensor where the value is known on the device only."""
        if name not in self._lists:
            host = self._on_host.get(name)
            self._lists[name] = list(self.on_device[name].unbind()) if host is None else host.tolist()
        return self._lists[name]

    def at(self, position: int) -> Scalars:
        """The scalars of the parameter at ``position``."""
        found = self._at.get(position)
        if found is None:
            known = {} if self._fewer is None else vars(self._fewer.at(position))
            further = {name: self.values(name)[position] for name in self.on_device if name not in known}
            found = self._at[position] = Scalars(**known, **further)
        return found

    def over(self, positions: list[int]) -> Scalars:
        """The scalars of several parameters: a float where it is the same for all parameters, else a list."""
        if len(positions) == 1:
            first = self.at(positions[0])
            if self._all_on_host:
                return first
            return Scalars(**{name: v if isinstance(v, float) else [v] for name, v in vars(first).items()})
        scalars = Scalars()
        same = self._same_everywhere()
        for name in self.on_device:
            uniform = same.get(name)
            setattr(scalars, name, [self.values(name)[p] for p in positions] if uniform is None else uniform)
        return scalars

    def _same_everywhere(self) -> dict[str, float]:
        """The scalars that are known on the host and the same for all parameters."""
        if self._fewer is not None:
            return self._fewer._same_everywhere()
        if self._uniform is None:
            lists = {name: list[Any](self.values(name)) for name in self._on_host}
            self._uniform = {
                name: values[0] for name, values in lists.items() if values.count(values[0]) == len(values)
            }
        return self._uniform

    def extended(self, further: Scalars) -> StepNumbers:
        """These vectors and ``further`` ones, which live on the device."""
        numbers = StepNumbers({**self.on_device, **further.__dict__}, {})
        numbers._on_host = dict(self._on_host)
        numbers._lists = dict(self._lists)
        numbers._fewer = self
        if all(v.device.type == "cpu" for v in vars(further).values()) and not torch.compiler.is_compiling():
            numbers._on_host.update(vars(further))
            numbers._all_on_host = self._all_on_host
        return numbers


def known_on_host(h: Scalars, device: torch.device) -> StepNumbers:
    """Numbers that the CPU knows, brought to ``device`` in one copy."""
    host = vars(h)
    if device.type == "cpu":
        return StepNumbers(host, host)
    packed = torch.stack(list(host.values()))
    if device.type == "mps":
        packed = packed.float()
    elif device.type == "cuda":
        packed = packed.pin_memory()
    moved = packed.to(device, non_blocking=True)
    return StepNumbers(dict(zip(host, moved.unbind(), strict=True)), host)
