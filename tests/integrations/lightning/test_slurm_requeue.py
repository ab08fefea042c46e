"""What a Slurm job asks of `scontrol`, and data-loader workers that a scheduler's signal reaches
too.
"""

import os
import signal

import pytest
from torch.utils.data import DataLoader

from lightning_ring.integrations.lightning.stop_requests import ignore_in_workers, job_name, requeue
from tests.processes import executable


def test_a_job_of_an_array_is_named_within_it():
    assert job_name({"SLURM_JOB_ID": "7"}) == "7"
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}
    assert job_name({"SLURM_JOB_ID": "7"} | array) == "5_2"


@pytest.mark.parametrize(
    ("script", "answer"),
    [
        ('test "$1 $2" = "requeue 7"', ""),
        ("echo Invalid job id >&2; exit 1", "scontrol requeue 7: Invalid job id"),
    ],
)
def test_what_scontrol_says_is_kept(script, answer, tmp_path, monkeypatch):
    executable(tmp_path / "scontrol", script)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert requeue("7") == answer


def test_without_scontrol_the_reason_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "No such file" in requeue("7")


def first_item(worker_id):
    os.environ["WORKER"] = str(worker_id)


class Where:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return os.environ.get("WORKER", "none"), os.getpid()


def test_workers_outlive_a_scheduler_s_signals_and_end_with_their_rank():
    loader = DataLoader(Where(), num_workers=1, collate_fn=list, worker_init_fn=first_item)
    for _ in range(2):  # a loader of an earlier fit
        ignore_in_workers(loader, [signal.SIGTERM, signal.SIGUSR1], rank=0)
    batches = iter(loader)
    name, pid = next(batches)[0]
    assert (name, pid != os.getpid()) == ("0", True)  # the user's own worker_init_fn has run
    if os.fork() == 0:  # a signal that the rank itself did not send
        os.kill(pid, signal.SIGUSR1)
        os.kill(pid, signal.SIGTERM)
        os._exit(0)
    os.wait()
    assert len(list(batches)) == 39
    batches = iter(loader)
    worker = batches._workers[0]
    next(batches)
    worker.terminate()
    worker.join(timeout=60)
    assert worker.exitcode == 0


def test_only_loaders_with_workers_are_touched():
    plain = DataLoader(Where(), num_workers=0)
    ignore_in_workers(plain, [signal.SIGTERM], rank=0)
    ignore_in_workers([1, 2], [signal.SIGTERM], rank=0)
    assert plain.worker_init_fn is None


def test_seeds_that_lightning_gives_to_workers_are_kept(monkeypatch):
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    loader = DataLoader(Where(), num_workers=1)
    ignore_in_workers(loader, [signal.SIGTERM], rank=1)
    _, seeds, *_ = loader.worker_init_fn.args
    assert seeds.keywords == {"rank": 1}
