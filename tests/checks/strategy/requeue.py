"""Slurm's warning before the end of a job's time, with a `scontrol` that is a stand-in: all
ranks save and end.
"""

import os
import signal
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_ring import RingStrategy
from lightning_ring.algorithms.sharded import Sharded
from tests.checks.models import (
    RANK,
    SIZE,
    WORLD,
    Classifier,
    assert_all_ranks_equal,
    fit,
    loader,
    parameters,
)

SLURM_JOB = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}


class Warned(Classifier):
    """Its highest rank gets ``signals`` during its second batch."""

    def __init__(self, *signals):
        super().__init__()
        self.signals = signals
        self.trained = 0

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trained += 1
        if batch_idx == 1 and RANK == SIZE - 1:
            for signum in self.signals:
                os.kill(os.getpid(), signum)


def fit_in_slurm(tmp_path, module, answer, **options):
    """Returns the jobs that were queued again, on rank 0."""
    queued = []

    def requeue(job):
        queued.append(job)
        return answer

    with (
        patch.dict(os.environ, SLURM_JOB),
        patch("lightning_ring.integrations.lightning.stop_requests.requeue", requeue),
    ):
        try:
            fit(
                RingStrategy(**options),
                module,
                max_epochs=1,
                default_root_dir=tmp_path,
                enable_checkpointing=True,
            )
        finally:
            WORLD.Barrier()
    return queued


def check_sigusr1_saves_on_all_ranks_at_one_step_and_requeues(tmp_path):
    for shard in (False, True):
        folder = tmp_path / str(shard)
        module = Warned(signal.SIGUSR1)
        with pytest.raises(SIGTERMException):
            fit_in_slurm(folder, module, "", algorithm=Sharded() if shard else None)
        assert WORLD.allgather(module.trained) == [module.trained] * SIZE
        saved = torch.load(folder / "hpc_ckpt_1.ckpt", weights_only=False)
        assert saved["global_step"] == module.trained
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def check_a_job_that_cannot_be_requeued_trains_on(tmp_path):
    module = Warned(signal.SIGUSR1)
    queued = fit_in_slurm(tmp_path, module, "Only batch jobs are accepted or processed")
    assert queued == (["5_2"] if RANK == 0 else [])
    assert module.trained == len(loader()) // SIZE
    assert (tmp_path / "hpc_ckpt_1.ckpt").exists()
    assert_all_ranks_equal(parameters(module))


def check_a_cancelled_job_is_not_requeued(tmp_path):
    with pytest.raises(SIGTERMException):
        fit_in_slurm(tmp_path, Warned(signal.SIGUSR1, signal.SIGTERM), "")
    assert not list(tmp_path.glob("hpc_ckpt_*"))
