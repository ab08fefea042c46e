"""A rank whose view is over stops, reports, completes a finished step, and connects anew."""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
import traceback
from typing import Protocol

import torch

from lightning_ring.comm.communicator import Communicator, ReduceOp
from lightning_ring.elastic.generations import Generations
from lightning_ring.elastic.member import Member
from lightning_ring.elastic.membership import JobEnded, Report, TooFewRanks, View
from lightning_ring.errors import (
    ConfigurationError,
    ModelMismatchError,
    PeerFailedError,
    RingError,
    StateLostError,
)
from lightning_ring.job.watch.peers import comes_from_a_peer

BLAME_SECONDS = 3.0  # a transport may see a death before the steward says so
# for the next view: the steward bounds this wait
VIEW_SECONDS = 24 * 3600.0
NUM_ATTEMPTS = 5  # to connect while every rank is alive
_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

_log = logging.getLogger("lightning_ring")


class EnterAgain(BaseException):
    """Ends the training's loops on all ranks, which begin again from the checkpoint that they
    hold."""


class ElasticTraining(Protocol):
    """What `Recovery` calls in the training that goes on."""

    def welcomes_newcomers(self) -> bool:
        """Whether newcomers can come in after this step. The same on all ranks."""

    def is_between(self, first_attempt: bool) -> bool:
        """Whether this rank stands where newcomers can come in.

        ``first_attempt``: it waits in `pause` for the next view.
        """

    def commit(self) -> None:
        """Finish the step whose averages are complete: step the optimizers. Calls no collective."""

    def take_back(self) -> None:
        """Undo the step under way. Called before `enter`, which may send state."""

    def enter(self, view: View, comm: Communicator) -> bool:
        """Go on over ``comm``, and give newcomers their state. Collective; called again if a rank
        dies.

        Returns whether all ranks hold a checkpoint from which they enter the training again.
        """


class Recovery:
    """Counts the finished steps, and brings ``training`` from one view of ``member`` to the next.

    A training step is: gradients and averages; ``complete = True``; `agree`; `commit`. Collectives
    of the step raise when the view is over. On this error call `after`. Repeat the step unless
    `step` has increased.

    Attributes:
        step: Number of optimizer steps that this rank has finished; `None` as long as it has no
            state.
        complete: Whether this rank holds the complete averages of the next step.
        view: The current view, of the ranks that are connected.
        newcomers_wait: Whether all ranks have agreed to let newcomers in: `pause` has to follow the
            step.
        parted: Whether this rank holds a part of the training's state.
        since: When this rank left the view before, in seconds of `time.perf_counter`.
    """

    def __init__(self, member: Member, generations: Generations, training: ElasticTraining) -> None:
        self.step: int | None = None
        self.complete = False
        self.view: View | None = None
        self.newcomers_wait = False
        self.parted = False
        self.since = 0.0
        self.training = training
        self._member = member
        self._generations = generations
        self._untried: tuple[int, ...] = ()

    def start(self) -> None:
        """Take part: in the first view, or as a newcomer. Blocks until this rank is connected."""
        self._go_on(None)

    def agree(self) -> None:
        """The commit barrier: returns once every rank of the view has complete averages.
        Collective.

        `newcomers_wait` is the same on all ranks afterwards.
        """
        self._generations.settle()  # else the averages may not be what their collectives promised
        wait = self._member.newcomers_wait and self.training.welcomes_newcomers()
        flag = torch.tensor([float(wait)])
        self._generations.communicator.all_reduce_(flag, op=ReduceOp.MAX, name="commit").wait()
        self.newcomers_wait = bool(flag.item())

    def commit(self) -> None:
        self.training.commit()
        self.committed()

    def committed(self) -> None:
        assert self.step is not None
        self.step += 1
        self.complete = False
        if self._member.number in self._untried:
            self._member.take_part()
        self._untried = ()

    def pause(self) -> None:
        """Let newcomers in, between two steps. Collective.

        If a rank dies meanwhile the others go on without them, and let them in after the next step.
        """
        try:
            # a rank that arrives first would stop the others too early
            self._generations.communicator.barrier()
        except Exception as error:  # also where others have left the barrier, and the view
            self.after(error, first_attempt=True)
        else:
            self._go_on(None, first_attempt=True)

    def after(self, error: Exception, first_attempt: bool = False) -> None:
        """Go on after ``error`` if the view is over, or without newcomers in their first step.

        Otherwise raise it.
        """
        if not is_from_a_peer(error):
            raise error
        if not self._member.is_over(BLAME_SECONDS):
            self._turn_away(error)
        self._go_on(error, first_attempt)

    def _go_on(self, error: Exception | None, first_attempt: bool = False) -> None:
        attempts = 0
        self.since = time.perf_counter()
        while True:
            _let_go(error)
            self._generations.close(_as_ring_error(error))
            between = self.training.is_between(first_attempt)
            first_attempt = False
            self._member.report(Report(self.step, self.complete, self.parted, between))
            view = self._member.next_view(VIEW_SECONDS)
            if self.step is not None and view.step is not None and view.step > self.step:
                self.commit()
            else:
                self.training.take_back()
            self.complete = self.newcomers_wait = False
            self.view, self._untried = view, view.newcomers
            try:
                again = self.training.enter(view, self._generations.open(view))
                if view.last:
                    self._generations.communicator.barrier()  # nobody needs this rank any more
                    raise TooFewRanks(f"The job ends: {view.last}.")
            except (JobEnded, StateLostError):
                raise
            except Exception as failure:
                may_pass = isinstance(failure, RingError | RuntimeError | TimeoutError)
                if isinstance(failure, ConfigurationError | ModelMismatchError) or not may_pass:
                    self._turn_away(failure)
                elif not self._member.is_over():  # a connection did not come up in time
                    attempts += 1
                    if attempts >= NUM_ATTEMPTS or not is_from_a_peer(failure):
                        self._turn_away(failure)
                    else:
                        _log.warning("The ranks connect again, after: %s", failure)
                error = failure
            else:
                if self.step is None:
                    self.step = view.step or 0
                if again:
                    raise EnterAgain
                return

    def _turn_away(self, error: Exception) -> None:
        """Have newcomers removed that do not fit, or fail in their first step with the others.

        Raises:
            JobEnded: This rank is one of them.
            Exception: ``error``, if there are none, or if it is that of this newcomer's own
                program.
        """
        newcomers = self._untried
        if not newcomers:
            raise error
        if self._member.number not in newcomers:
            self._member.turn_away(newcomers)
            if self.view is not None and self.view.members[0] == self._member.number:
                them = (
                    f"Process {newcomers[0]}"
                    if len(newcomers) == 1
                    else f"Processes {[*newcomers]}"
                )
                what_follows = "the job goes on without, and starts no other in its place"
                why = f"{type(error).__name__}: {error}"
                _log.warning("lightning_ring: %s cannot join, and %s. %s", them, what_follows, why)
        elif isinstance(error, RingError):
            self._member.turn_away([self._member.number])
            raise JobEnded("It cannot join the others, which go on without it.") from error
        else:
            raise error


def is_from_a_peer(error: BaseException) -> bool:
    """Whether ``error`` may come from a rank that has gone; transports do not know the reason."""
    if isinstance(error, JobEnded):
        return False
    return isinstance(error, RingError | TimeoutError) or comes_from_a_peer(error)


def _let_go(error: BaseException | None) -> None:
    """Drop what the frames of ``error`` hold: the next view uses the memory of buckets again."""
    seen: set[int] = set()  # a script's own chain of errors may be a ring
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            # clearing the frame of a generator that handled the error would close it
            if not frame.f_code.co_flags & _SUSPENDABLE:
                with contextlib.suppress(RuntimeError):
                    frame.clear()
        error = error.__cause__ or error.__context__


def _as_ring_error(error: Exception | None) -> RingError | None:
    if error is None or isinstance(error, RingError):
        return error
    return PeerFailedError(str(error))
