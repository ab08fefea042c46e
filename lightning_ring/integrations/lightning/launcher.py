"""Plain ``python train.py`` becomes N ranks: Lightning's launcher for processes that no launcher started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from lightning.pytorch.strategies.launchers.launcher import _Launcher

from lightning_ring.errors import ConfigurationError, RankDiscoveryError
from lightning_ring.integrations.lightning.environment import RingEnvironment
from lightning_ring.launch.hosts import slots_of_allocation
from lightning_ring.launch.mpirun import find_mpirun
from lightning_ring.launch.rerun import own_command
from lightning_ring.launch.start import mpirun_job, plain_job
from lightning_ring.launch.supervisor import Supervisor

if TYPE_CHECKING:
    import lightning.pytorch as pl


class JobFinished(SystemExit):
    """The ranks have run the script, so the process that started them ends with their exit code, in ``code``.

    A Hydra sweep that starts its jobs with plain ``python`` catches it and goes on to the next job if ``code`` is 0.
    """


class RingLauncher(_Launcher):
    """Starts ``num_processes`` ranks of this script, unless a launcher has: then it does nothing.

    The process that starts them is never a rank. It supervises: forwards signals, names a rank that died, ends the
    others, and then ends itself with the job's exit code; the ranks run the code after ``trainer.fit``.

    ``use_mpi``: through the mpirun that is found (beside this Python first), if any. Otherwise, without one, and where
    a Slurm job has fewer tasks than ranks, which mpirun refuses, the ranks are plain processes that talk through shared
    memory, Gloo or NCCL.
    """

    def __init__(self, environment: RingEnvironment, num_processes: int, num_nodes: int, *, use_mpi: bool) -> None:
        self._environment = environment
        self._num_processes = num_processes
        self._num_nodes = num_nodes
        self._use_mpi = use_mpi
        self._job: Supervisor | None = None

    @property
    def is_interactive_compatible(self) -> bool:
        return self._environment.creates_processes_externally

    def launch(self, function: Callable, *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Run ``function`` here if this process is a rank; otherwise start the ranks, wait, and end this process.

        Raises:
            JobFinished: With the job's exit code, in the process that started the ranks.
            ConfigurationError: Several nodes, which only mpirun, ringrun, srun or torchrun can start.
        """
        if self._environment.creates_processes_externally or self._num_processes * self._num_nodes == 1:
            return function(*args, **kwargs)
        if self._num_nodes > 1:
            ranks, slots = self._num_processes * self._num_nodes, self._num_processes
            raise ConfigurationError(
                f"num_nodes={self._num_nodes}, and no launcher started this process. Python can start ranks on this "
                f"host only: use `ringrun -n {ranks} -H host1:{slots},... train.py`, mpirun, srun or torchrun."
            )
        if "RING_LAUNCHER_PID" in os.environ:
            raise RankDiscoveryError(
                "This process was started as a rank, but the variables that tell its rank are gone, and it would start "
                "all ranks once more. Let whatever stands between the launcher and Python keep the environment."
            )
        self._start_and_wait(trainer)

    def kill(self, signum: int) -> None:
        """Lightning calls it when it gets a signal itself. In a rank there is nothing to kill."""
        if self._job is not None:
            self._job.kill(signum)

    def _start_and_wait(self, trainer: pl.Trainer | None) -> NoReturn:
        sys.stdout.flush()  # before the ranks write to the same place
        sys.stderr.flush()
        mpirun = find_mpirun() if self._use_mpi and slots_of_allocation(os.environ) >= self._num_processes else None
        with own_command() as command:
            if mpirun is not None:
                self._job = mpirun_job(mpirun, self._num_processes, command, [], os.environ)
            else:
                self._job = plain_job(self._num_processes, command, os.environ)
            code = self._job.run()
        if trainer is not None:
            # Lightning now treats the exit as an interrupted fit; it must not save or log in the ranks' place
            trainer.callbacks = []  # type: ignore[attr-defined]
            trainer.loggers = []
        raise JobFinished(code)
