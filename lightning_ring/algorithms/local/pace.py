"""How many steps ranks take alone, from what a step and an average were measured to take."""

from __future__ import annotations

import math
from statistics import median

import torch

from lightning_ring.comm.communicator import Communicator, ReduceOp
from lightning_ring.comm.timing import Mark, now, seconds_between

FIRST_EVERY = 4  # while it measures
MEASURED_ROUNDS = 2
SHARE = 0.1  # of the time of the steps, which averages may take on top
MOST = 512


class Pace:
    """Marks of this rank's steps, and the seconds of its averages.

    Attributes:
        last: The end of the last step, or of the average after it.
    """

    def __init__(self) -> None:
        self.last: Mark | None = None
        self.averages: list[float] = []
        self._steps: list[tuple[Mark, Mark]] = []

    def step_ended(self, device: torch.device) -> None:
        ended = now(device)
        if self.last is not None:
            self._steps.append((self.last, ended))
        self.last = ended

    def choose(self, comm: Communicator) -> tuple[int, str]:
        """The same number of steps on every rank, and the reason. Collective.

        Of averages the ranks' least counts, which is that of the last to come, and of steps the
        ranks' greatest.
        """
        step = median(seconds_between(*pair, comm) for pair in self._steps)
        values = torch.tensor([step, -min(self.averages)], dtype=torch.float64)
        comm.all_reduce_(values, op=ReduceOp.MAX, name="a step and an average").wait()
        step, average = values[0].item(), -values[1].item()
        every = min(MOST, max(1, math.ceil(average / (SHARE * step)))) if step > 0 else MOST
        return every, f"a step takes {1e3 * step:.1f} ms, an average {1e3 * average:.1f} ms"
