"""This process in an elastic job: its place, its connections and its count of steps, which
outlive a fit.
"""

from __future__ import annotations

import atexit
from dataclasses import dataclass, fields
from datetime import timedelta

import torch

from lightning_ring.elastic.ending import end_job_on_error
from lightning_ring.elastic.generations import Generations
from lightning_ring.elastic.recovery import ElasticTraining, Recovery
from lightning_ring.errors import ConfigurationError
from lightning_ring.membership.member import Member


@dataclass(frozen=True, slots=True)
class Connecting:
    """How a process connects: arguments of `Generations`, and of `RingStrategy`."""

    backend: str
    device: torch.device
    timeout: timedelta
    stall_warning: timedelta
    topology: str


class ElasticProcess:
    """Opened once, by the first fit. An uncaught exception in this process ends the job from then
    on.

    Attributes:
        is_newcomer: Whether the training had begun when this process connected.
        fitting: Whether a fit is under way, so that the end of this process is no end of its
            training.
        was_stopped: Whether all ranks left a fit together, as a signal asked them to.
        num_fits: Fits that this process has begun.
    """

    def __init__(self, connecting: Connecting, training: ElasticTraining) -> None:
        self.member = Member()
        self.member.open()
        end_job_on_error(self.member)
        self.is_newcomer = bool(self.member.first_ranks)
        self.fitting = False
        self.was_stopped = False
        self.num_fits = 0
        self.connecting = connecting
        ways = (getattr(connecting, part.name) for part in fields(connecting))
        self.generations = Generations(self.member, *ways)
        self.recovery = Recovery(self.member, self.generations, training)
        self._entered = "", 0
        self._entries = 0
        atexit.register(self._say_at_exit)

    def count_entries(self, path: str, version: int) -> int:
        """How often in a row a fit has gone on from this ``version`` of a file, with this time."""
        self._entries = self._entries + 1 if self._entered == (path, version) else 1
        self._entered = path, version
        return self._entries

    def _say_at_exit(self) -> None:
        if self.was_stopped:
            self.member.fail(
                "its ranks were asked to stop (SIGTERM), and did so at the same step", 143
            )
        elif not self.fitting:
            self.member.finish()


_process: ElasticProcess | None = None


def elastic_process(connecting: Connecting, training: ElasticTraining) -> ElasticProcess:
    """This process, whose recovery calls ``training`` from now on.

    Raises:
        ConfigurationError: It is connected already, in another way.
    """
    global _process
    if _process is None:
        _process = ElasticProcess(connecting, training)
    elif _process.connecting != connecting:
        raise ConfigurationError(
            f"The ranks of this process are connected with {_process.connecting}, and the strategy "
            f"of another fit asks for {connecting}. An elastic job connects once: give all "
            "strategies of the script the same backend, device, timeout, stall_warning and "
            "topology."
        )
    _process.recovery.training = training
    return _process
