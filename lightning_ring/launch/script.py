"""This script on N ranks of this host: what plain ``python train.py`` becomes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_ring.launch.elastic import ElasticJob, ElasticLimits
from lightning_ring.launch.hosts import slots_of_allocation
from lightning_ring.launch.mpirun import find_mpirun
from lightning_ring.launch.rerun import own_command
from lightning_ring.launch.start import mpirun_job, plain_job
from lightning_ring.launch.supervisor import Supervisor


class JobFinished(SystemExit):
    """The ranks have run the script, so the process that started them ends with their exit code, in
    ``code``.

    A Hydra sweep that starts its jobs with plain ``python`` catches it and goes on to the next job
    if ``code`` is 0.
    """


@contextmanager
def script_job(ranks: int, *, use_mpi: bool) -> Iterator[Supervisor]:
    """A job that runs this script on ``ranks`` ranks of this host, not yet started.

    ``use_mpi``: through the mpirun that is found (beside this Python first), if any. Otherwise,
    without one, and where a Slurm job has fewer tasks than ranks, which mpirun refuses, the ranks
    are plain processes.
    """
    mpirun = find_mpirun() if use_mpi and slots_of_allocation(os.environ) >= ranks else None
    with own_command() as command:
        if mpirun is not None:
            yield mpirun_job(mpirun, ranks, command, [], os.environ)
        else:
            yield plain_job(ranks, command, os.environ)


@contextmanager
def elastic_script_job(limits: ElasticLimits) -> Iterator[ElasticJob]:
    """A job that runs this script on this host and outlives its ranks, not yet started. This
    process is its steward.
    """
    with own_command() as command:
        yield ElasticJob(command, limits)
