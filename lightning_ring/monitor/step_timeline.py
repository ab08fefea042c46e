"""The timeline of a Trainer: what `StepTimer` and a strategy's collectives tell, as slices of a
trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.recording import Listener
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.accelerator import synchronize
from lightning_ring.monitor.step_times import StepRecord, StepTimer
from lightning_ring.timeline.recorder import (
    BACKWARD,
    DATA,
    FORWARD,
    OPTIMIZER,
    PAUSES,
    RANKS,
    STEPS,
)
from lightning_ring.timeline.session import Session, join_session, start_session

_SLICES = {
    "data": (DATA, "data wait"),
    "copy": (DATA, "copy to device"),
    "forward": (FORWARD, "forward"),
    "backward": (BACKWARD, "backward"),
    "optimizer": (OPTIMIZER, "optimizer step"),
}


# no lambda: ``start_method="spawn"`` pickles the strategy
def _call(run: Callable[[], Any]) -> Any:
    return run()


class StepTimeline:
    """Records a fit in a trace, from its start, or from `start` to `stop`.

    Each recording makes a trace of its own: ``trace.json``, ``trace-2.json`` and so on.

    Attributes:
        number: Of this process, where ranks may change (`ranks_changed`).
        waits: Whether others record already, or may, whom this process is to join.
        lets_in: Whether all ranks enter the fit again, some of which may record already.
        call_together: Calls collectives that all ranks call, again where a rank dies in them.
    """

    def __init__(self, path: Path | None, listeners: list[Listener]) -> None:
        self.path = path
        self._listeners = listeners
        self._trainer: Trainer | None = None
        self._comm: Communicator | None = None
        self._session: Session | None = None
        self._timer: StepTimer | None = None
        self.number: int | None = None
        self.waits = self.lets_in = False
        self.call_together = _call

    @property
    def recording(self) -> bool:
        return self._session is not None

    def start(self, path: str | Path | None = None) -> None:
        """Record from now on. All ranks call it at the same point of a fit. Where it records
        already: nothing.

        Args:
            path: Where rank 0 writes the merged trace at the end; default: what the strategy was
                given.

        Raises:
            ConfigurationError: There is no path or no fit, or some rank cannot write; the same on
                every rank.
        """
        if self.recording:
            return
        chosen = path or self.path
        if chosen is None:
            raise ConfigurationError(
                "The timeline was started without a path. Give it one, "
                "strategy.timeline.start('trace.json'), or RingStrategy(timeline='trace.json')."
            )
        trainer = self._trainer
        if trainer is None:
            raise ConfigurationError(
                "The timeline was started outside a fit. Start it in a hook of the module or of a "
                "callback, such as on_train_batch_start, on all ranks; "
                "RingStrategy(timeline='trace.json') records from the start."
            )
        about = {
            "strategy": type(trainer.strategy).__name__,
            "epoch": trainer.current_epoch,
            "ranks_change": self.number is not None,
        }
        session = start_session(
            Path(chosen),
            self._comm,
            about=about,
            device=trainer.strategy.root_device,
            number=self.number,
        )
        self._record_in(session, trainer)

    def _record_in(self, session: Session, trainer: Trainer) -> None:
        self._session = session
        session.recorder.begin_step(_batch_number(trainer), time.perf_counter())
        self._listeners.append(session.recorder.collective)
        self._timer = StepTimer.attach(trainer, self._on_step)
        self._timer.interruption_listeners.append(self._on_interruption)

    def stop(self) -> None:
        """End the recording; rank 0 merges. All ranks call it at the same point. Where nothing
        is recorded: nothing.
        """
        trainer, session = self._trainer, self._detach()
        ranks_change = self.number is not None and self.path is not None
        if trainer is None or not (session or ranks_change):
            return
        # what it has not come to would be left out
        synchronize(trainer.strategy.root_device)

        def gather() -> list[str] | None:
            # another one where a rank has died in the first attempt
            comm = self._comm
            mine = session is not None
            if ranks_change and comm:
                mine = all(comm.all_gather_object(mine, name="timeline: sessions"))
            if session is None or not mine:
                return None
            session.comm = comm
            return session.gather()

        problems = self.call_together(gather)
        if session and problems is None:
            # one that joined could not record: `lightning-ring timeline` merges the others
            session.close()
        elif session:
            session.merge(problems)

    # -- what the strategy calls

    def prepare(self, trainer: Trainer, comm: Communicator | None) -> None:
        """A fit is set up; what cannot be written is an error now. Collective."""
        self._trainer, self._comm = trainer, comm
        # plain mpirun hands no RING_TIMELINE to other hosts, and starting is collective
        if comm:
            self.path = comm.broadcast_object(self.path, name="timeline: path")
        if self.lets_in:
            self.lets_in = self.waits = False
            if comm:
                # ranks that do not record do so where the others do
                assert self.number is not None
                device = trainer.strategy.root_device
                made = join_session(self._session, comm, self.number, device)
                if made:
                    self._record_in(made, trainer)
                self.waits = comm.broadcast_object(self.recording, name="timeline: others record")
        self._start_if_asked()

    def _start_if_asked(self) -> None:
        if self.path and not self.waits and self._trainer:
            self.start()

    def begin_training(self) -> None:
        # a fit within this one (a search for the learning rate) has ended its own
        self._start_if_asked()
        if self._timer:
            self._timer.restart()

    def begin_batch(self) -> None:
        if self._session and self._trainer:
            self._session.recorder.begin_step(_batch_number(self._trainer), time.perf_counter())

    def follow(self, comm: Communicator) -> None:
        """Other ranks are connected through ``comm`` from now on."""
        self._comm = comm

    def ranks_changed(self, text: str, since: float) -> None:
        """Ranks have died or come, as ``text`` says; training has stood still ``since`` then
        (seconds).
        """
        if self._session:
            self._session.recorder.slice(RANKS, text, since, time.perf_counter())

    def abandon(self) -> None:
        """The fit is torn down, perhaps after an error on one rank: close this rank's file, ask
        nobody.
        """
        session = self._detach()
        self._trainer, self._comm, self.waits = None, None, False
        if session:
            session.close()

    def _detach(self) -> Session | None:
        session, self._session = self._session, None
        if session and self._timer and self._trainer:
            self._listeners.remove(session.recorder.collective)
            self._timer.interruption_listeners.remove(self._on_interruption)
            self._timer.detach(self._trainer, self._on_step)
            self._timer = None
        return session

    # -- what is told

    def _on_step(self, record: StepRecord) -> None:
        session, trainer = self._session, self._trainer
        if session is None or trainer is None:
            return
        recorder = session.recorder
        step = {"step": recorder.step}
        whole = step | {"epoch": trainer.current_epoch, "optimizer_steps": trainer.global_step}
        ended = record.began + record.total
        recorder.slice(STEPS, f"step {recorder.step}", record.began, ended, whole)
        # automatic optimization runs forward and backward at the begin of the optimizer's step
        inside = None
        for phase, begin, end in record.marks:
            if phase == "optimizer" and inside is not None:
                begin = inside
            if phase == "forward" or (phase == "backward" and inside is not None):
                inside = end
            recorder.slice(*_SLICES[phase], begin, end, step)

    def _on_interruption(self, what: str, began: float, ended: float) -> None:
        if self._session:
            self._session.recorder.slice(PAUSES, what, began, ended)


def _batch_number(trainer: Trainer) -> int:
    """Training batches of the fit before this one."""
    return max(0, trainer.fit_loop.epoch_loop.total_batch_idx)
