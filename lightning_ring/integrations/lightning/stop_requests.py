"""Requests to stop or to requeue: a signal becomes a flag, on which all ranks act at one step."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader

from lightning_ring.comm.communicator import Communicator

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
        """Handle SIGTERM, the launcher's signal, and Slurm's requeue signal. Main thread only.

        Lightning's own handler would start a collective at any point.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        if several_ranks:
            for number in stop_signals():
                signal.signal(number, lambda *_: self.request(StopRequest.STOP))
        requeue = self._requeue_signal
        if requeue is None or IN_SLURM not in os.environ or requeue in stop_signals():
            return
        # as Lightning: a handler of the user's stays
        if signal.getsignal(requeue) == signal.SIG_DFL:
            signal.signal(requeue, lambda *_: self.request(StopRequest.REQUEUE))

    def request(self, request: StopRequest) -> None:
        self.pending = max(self.pending, request)
        self._ask(True)

    def follow(
        self, trainer: pl.Trainer, comm: Communicator | None, before: Callable[[], None]
    ) -> None:
        """Between two batches: clear the highest request of all ranks, and act on it after
        ``before()``. Collective.

        Raises:
            SIGTERMException: The training ends, on every rank at the same step.
        """
        # Lightning's own handler gets a SIGTERM in a single process
        mine = StopRequest.STOP if trainer.received_sigterm else self.pending
        asked = mine
        if comm is not None:
            asked = max(comm.all_gather_object(mine, name="requests to stop"))
        if self.pending == mine and asked != StopRequest.STOP:
            self.pending = StopRequest.NONE
            self._ask(False)
        if asked == StopRequest.NONE:
            return
        before()
        if asked == StopRequest.STOP or save_and_requeue(trainer):
            self.stops_together = True
            raise SIGTERMException(143)  # 128 + SIGTERM


def stop_signals() -> list[signal.Signals]:
    named = os.environ.get(STOP_SIGNAL_VARIABLE)
    return [signal.SIGTERM] + ([signal.Signals(int(named))] if named else [])


def leave_sigterm_to_the_buckets(trainer: pl.Trainer) -> None:
    """Turn off the Trainer's broadcast of a SIGTERM: the buckets carry this request already.

    Lightning broadcasts it in torch's default group before every batch. If ranks take different
    numbers of steps, one would wait in that group and one in the communicator, forever. The
    communicator alone detects the error.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


IN_SLURM = "SLURM_JOB_ID"  # only its jobs have this variable


def save_and_requeue(trainer: pl.Trainer) -> bool:
    """Save a checkpoint where Lightning looks for it when a Slurm job restarts, and queue the job.
    Collective.

    The path is Lightning's: ``hpc_ckpt_N.ckpt`` in the Trainer's ``default_root_dir``. A ``fit``
    without ``ckpt_path`` continues from the highest N. Returns whether the job is queued again, the
    same on all ranks; if not, after a warning, training goes on.
    """
    strategy = trainer.strategy
    path = strategy.broadcast(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))
    trainer.save_checkpoint(path)
    rank_zero_info(
        f"lightning_ring: checkpoint of optimizer step {trainer.global_step} saved before "
        f"requeueing: {path}"
    )
    job = job_name(os.environ)
    error: str = strategy.broadcast(requeue(job) if trainer.is_global_zero else "")
    if error:
        rank_zero_warn(
            f"lightning_ring: job {job} was not queued again, and training goes on: {error}"
        )
        return False
    rank_zero_info(f"lightning_ring: Slurm job {job} is queued again; all ranks end")
    return True


def job_name(environ: Mapping[str, str]) -> str:
    """The job's name for ``scontrol``; an array's plain number may mean the whole array."""
    if "SLURM_ARRAY_JOB_ID" in environ and "SLURM_ARRAY_TASK_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ[IN_SLURM]


def requeue(job: str) -> str:
    """Queue ``job`` again, which ends it now. Returns an error message, or ``""``."""
    command = ["scontrol", "requeue", job]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command)}: {error}"
    if result.returncode == 0:
        return ""
    return f"{' '.join(command)}: {(result.stderr or result.stdout).strip()}"


def ignore_in_workers(loader: Any, signals: Sequence[signal.Signals], rank: int) -> None:
    """Have workers that ``loader`` starts ignore ``signals``, unless their rank sends them.

    Slurm signals every process of a job. A worker that dies raises an error in its rank, which then
    misses the step at which all ranks save.
    """
    if not isinstance(loader, DataLoader) or loader.num_workers == 0:
        return
    _auto_add_worker_init_fn(loader, rank)  # Lightning adds it later, and only if there is none
    then = loader.worker_init_fn
    if getattr(then, "func", None) is not _start_worker:
        loader.worker_init_fn = functools.partial(_start_worker, tuple(signals), then)


def _start_worker(
    signals: tuple[signal.Signals, ...], then: Callable[[int], None] | None, worker_id: int
) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    threading.Thread(
        target=_wait_for_the_rank, args=(signals,), name="ring-worker-signals", daemon=True
    ).start()
    if then is not None:
        then(worker_id)


def _wait_for_the_rank(signals: tuple[signal.Signals, ...]) -> None:
    """End this worker when its own rank sends SIGTERM."""
    while True:
        received = signal.sigwaitinfo(signals)
        if received.si_signo == signal.SIGTERM and received.si_pid == os.getppid():
            os._exit(0)
