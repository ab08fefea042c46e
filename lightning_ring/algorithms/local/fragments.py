"""Parameters in fragments of about equal size, which travel at different steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch.nn import Parameter


class Fragments:
    """To which of ``count`` fragments each parameter belongs: consecutive parameters are
    together.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._of: dict[Parameter, int] = {}

    def __getitem__(self, index: int) -> list[Parameter]:
        return [param for param, own in self._of.items() if own == index]

    def add(self, params: Iterable[Parameter]) -> None:
        """Those that are added later go to the smallest fragment; nothing that was added before
        moves.
        """
        new = [param for param in params if param not in self._of]
        if self._of:
            for param in new:
                self._of[param] = min(
                    range(self.count), key=lambda index: sum(p.numel() for p in self[index])
                )
            return
        total, before, index = sum(param.numel() for param in new), 0, 0
        for place, param in enumerate(new):
            is_full = (before + param.numel() / 2) * self.count >= (index + 1) * total
            # one for each fragment that is still empty
            are_few = len(new) - place < self.count - index
            if place and index < self.count - 1 and (is_full or are_few):
                index += 1
            self._of[param] = index
            before += param.numel()

    def by_name(self, names: Mapping[Parameter, str]) -> dict[str, int]:
        return {names[param]: index for param, index in self._of.items()}

    def load(self, saved: Mapping[str, int], params: Mapping[str, Parameter]) -> None:
        """``saved`` as of `by_name`."""
        self._of = {params[name]: index for name, index in saved.items()}
