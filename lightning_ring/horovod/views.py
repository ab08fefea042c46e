"""The ranks of a job that goes on when ranks die, as `init` opens them."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable

import torch

from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.waiting import WaitPolicy
from lightning_ring.elastic.ending import end_job_on_error
from lightning_ring.elastic.generations import Generations
from lightning_ring.elastic.member import Member
from lightning_ring.elastic.membership import GenerationOver, JobEnded, Report
from lightning_ring.elastic.recovery import (
    BLAME_SECONDS,
    NUM_ATTEMPTS,
    VIEW_SECONDS,
    is_from_a_peer,
)
from lightning_ring.errors import ConfigurationError, HorovodInternalError, RingError
from lightning_ring.horovod.variables import STALL_WARNING, TIMEOUT, cpu_backend
from lightning_ring.job.job import Job


class RanksChanged(HorovodInternalError, GenerationOver):
    """A rank died, or others stop for newcomers."""


class Views:
    """This process in the job of a steward. Constructing it connects.

    Attributes:
        has_state: Whether others can get the state from this rank.
    """

    def __init__(self) -> None:
        self.has_state = False
        self.member = Member()
        self.member.over_error = RanksChanged
        self.member.open()
        end_job_on_error(self.member)
        atexit.register(self._finish)
        self._generations = Generations(
            self.member, cpu_backend(), torch.device("cpu"), TIMEOUT, STALL_WARNING
        )
        self._policy: WaitPolicy | None = None

    @property
    def members(self) -> tuple[int, ...]:
        view = self.member.view
        assert view is not None, "open() comes first"
        return view.members

    def open(self, enter: Callable[[Job, Communicator], None], leave: Callable[[], None]) -> None:
        """Take part in the next view, and call ``enter``. Collective.

        If a rank dies meanwhile, ``leave`` closes what ``enter`` opened, and it begins again.
        """
        attempts = 0
        while True:
            self.member.report(Report(0 if self.has_state else None, between=True))
            view = self.member.next_view(VIEW_SECONDS)
            try:
                negotiated = self._generations.open(view)
                job = self._generations.job
                assert job is not None
                job.communicator = None  # the next one would close it
                self._policy = job.policy
                enter(job, negotiated)
                self.member.take_part()
                return
            except (JobEnded, ConfigurationError):
                raise
            except (RingError, RuntimeError, TimeoutError) as error:
                if not self.member.is_over():  # a connection did not come up in time
                    attempts += 1
                    if attempts >= NUM_ATTEMPTS or not is_from_a_peer(error):
                        raise
            self.break_off()
            leave()
            self.close(broken=True)

    def is_over(self, error: BaseException) -> bool:
        """Whether ``error`` may come from a death or from newcomers.

        Raises:
            JobEnded: The job has ended.
        """
        if isinstance(error, HorovodInternalError):
            if isinstance(error.__cause__, JobEnded):
                raise error.__cause__
            return True
        return is_from_a_peer(error) and self.member.is_over(BLAME_SECONDS)

    def break_off(self) -> None:
        """End every wait of this rank, in any thread."""
        over = RanksChanged("the ranks of this generation do not go on together.")
        if self._policy is not None:
            self._policy.fail(over)
        self.member.on_stop(over)

    def close(self, *, broken: bool) -> None:
        """End the generation, whose communicators are closed."""
        error = RanksChanged("the generation is over.") if broken else None
        self._generations.close(error)

    def _finish(self) -> None:
        with contextlib.suppress(RingError):
            self.member.finish()
            self.member.close()
