"""Lightning's launcher for plain ``python train.py``, which becomes N ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies.launchers.launcher import _Launcher

from lightning_ring.errors import ConfigurationError
from lightning_ring.integrations.ranks.environment import RingEnvironment
from lightning_ring.job.launchers import check_not_started_again
from lightning_ring.launch.elastic import ElasticJob, ElasticLimits
from lightning_ring.launch.script import JobFinished, elastic_script_job, script_job
from lightning_ring.launch.supervisor import Supervisor

if TYPE_CHECKING:
    import lightning.pytorch as pl


@dataclass
class RingLauncher(_Launcher):
    """Starts ``num_processes`` ranks of this script, unless a launcher has.

    The process that starts them is never a rank. It forwards signals, names a rank that died, ends
    the others, and ends with the job's exit code; the ranks run the code after ``trainer.fit``.

    ``use_mpi`` is that of `script_job`. With ``limits`` the job outlives its ranks
    (`elastic_script_job`).
    """

    environment: RingEnvironment
    num_processes: int
    num_nodes: int
    use_mpi: bool
    limits: ElasticLimits | None = None

    @property
    def is_interactive_compatible(self) -> bool:
        return self.environment.creates_processes_externally

    def launch(
        self, function: Callable, *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any
    ) -> Any:
        """Run ``function`` in a rank; otherwise start the ranks, wait, and end this process.

        Raises:
            JobFinished: With the job's exit code, in the process that started the ranks.
            ConfigurationError: Several nodes, which only mpirun, ringrun, srun or torchrun can
                start.
        """
        if self.environment.creates_processes_externally:
            return function(*args, **kwargs)
        if self.num_nodes > 1:
            ranks, slots = self.num_processes * self.num_nodes, self.num_processes
            raise ConfigurationError(
                f"num_nodes={self.num_nodes}, and no launcher started this process. Python can "
                f"start ranks on this host only: use `ringrun -n {ranks} -H host1:{slots},... "
                "train.py`, mpirun, srun or torchrun."
            )
        check_not_started_again(os.environ)
        started: AbstractContextManager[Supervisor | ElasticJob] = (
            elastic_script_job(self.limits)
            if self.limits is not None
            else script_job(self.num_processes, use_mpi=self.use_mpi)
        )
        with started as job:
            code = job.run()
        if trainer is not None:
            # Lightning treats the exit as an interrupted fit; it must not save or log here
            trainer.callbacks = []  # type: ignore[attr-defined]
            trainer.loggers = []
        raise JobFinished(code)

    def kill(self, signum: int) -> None:
        """Ranks have no processes to kill."""
