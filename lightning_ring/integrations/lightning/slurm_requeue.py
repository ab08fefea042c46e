"""Requeueing at the end of a Slurm job's time: all ranks save a checkpoint, and the job is
queued again.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

if TYPE_CHECKING:
    import lightning.pytorch as pl

_SCONTROL_SECONDS = 60.0


def in_slurm_job(environ: Mapping[str, str]) -> bool:
    return "SLURM_JOB_ID" in environ


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
    """The job's name for ``scontrol``. The plain number of an array's job may mean the whole
    array.
    """
    if "SLURM_ARRAY_JOB_ID" in environ and "SLURM_ARRAY_TASK_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ["SLURM_JOB_ID"]


def requeue(job: str) -> str:
    """Queue ``job`` again, which ends it now. Returns an error message, or ``""``."""
    command = ["scontrol", "requeue", job]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command)}: {error}"
    return (
        ""
        if result.returncode == 0
        else f"{' '.join(command)}: {(result.stderr or result.stdout).strip()}"
    )
