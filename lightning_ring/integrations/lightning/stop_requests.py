"""Requests to stop or to requeue: a signal becomes a flag, so that all ranks act on it at the
same step.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_ring.comm.communicator import Communicator
from lightning_ring.integrations.lightning.slurm_requeue import in_slurm_job, save_and_requeue

if TYPE_CHECKING:
    import lightning.pytorch as pl

# number of the signal that our launchers have mpirun forward to the ranks
STOP_SIGNAL_VARIABLE = "RING_STOP_SIGNAL"


class StopRequest(IntEnum):
    """A request to this rank. Of several ranks' requests the highest counts."""

    NONE = 0
    REQUEUE = 1
    STOP = 2


class StopRequests:
    """Handlers of the signals to stop or to requeue, and the agreement of all ranks on a request.

    ``ask`` is called with True when this rank has a request, and with False when the request was
    met. ``requeue_signal`` is Slurm's before the end of the job's time, or `None`.

    Attributes:
        pending: The request of this rank.
        stops_together: Whether all ranks leave the training loop at one step.
    """

    def __init__(self, requeue_signal: signal.Signals | None, ask: Callable[[bool], None]) -> None:
        self.pending = StopRequest.NONE
        self.stops_together = False
        self._requeue_signal = requeue_signal
        self._ask = ask

    def catch_signals(self, *, several_ranks: bool) -> None:
        """Handle SIGTERM, the launcher's signal, and in a Slurm job the requeue signal. Main thread
        only.

        Lightning's own handler starts a collective wherever the signal happens to find the rank.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        if several_ranks:
            for number in stop_signals():
                signal.signal(number, lambda *_: self.request(StopRequest.STOP))
        requeue = self._requeue_signal
        if requeue is None or not in_slurm_job(os.environ) or requeue in stop_signals():
            return
        # as Lightning: a handler of the user's stays
        if signal.getsignal(requeue) == signal.SIG_DFL:
            signal.signal(requeue, lambda *_: self.request(StopRequest.REQUEUE))

    def request(self, request: StopRequest) -> None:
        self.pending = max(self.pending, request)
        self._ask(True)

    def agree(self, comm: Communicator | None, *, received_sigterm: bool) -> StopRequest:
        """Return the highest request of all ranks, and clear it. Collective.

        ``received_sigterm``: Lightning's own handler got a SIGTERM, as in a single process.
        """
        mine = StopRequest.STOP if received_sigterm else self.pending
        asked = (
            max(comm.all_gather_object(mine, name="requests to stop")) if comm is not None else mine
        )
        if self.pending == mine and asked != StopRequest.STOP:
            self.pending = StopRequest.NONE
            self._ask(False)
        return asked

    def follow(
        self, trainer: pl.Trainer, comm: Communicator | None, before: Callable[[], None]
    ) -> None:
        """Between two batches: stop or requeue on all ranks if some rank was asked to, after
        ``before()``. Collective.

        Raises:
            SIGTERMException: The training ends, on every rank at the same step.
        """
        request = self.agree(comm, received_sigterm=trainer.received_sigterm)
        if request == StopRequest.NONE:  # the request was met before this flag arrived
            return
        before()
        if request == StopRequest.STOP or save_and_requeue(trainer):
            self.stops_together = True
            raise SIGTERMException(143)  # 128 + SIGTERM


def stop_signals() -> list[signal.Signals]:
    named = os.environ.get(STOP_SIGNAL_VARIABLE)
    return [signal.SIGTERM] + ([signal.Signals(int(named))] if named else [])


def leave_sigterm_to_the_buckets(trainer: pl.Trainer) -> None:
    """Turn off the Trainer's broadcast of a SIGTERM: the buckets carry this request already.

    Before every batch Lightning broadcasts it in torch's default group, and waits for the device.
    If ranks take different numbers of steps, one would wait in that group and one in the
    communicator, forever. The communicator alone detects the error.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing  # type: ignore[method-assign]


def _nothing() -> None:
    return None
