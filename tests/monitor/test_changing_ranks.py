"""Monitor and timeline where ranks die and join: a rank may miss an exchange, or record nothing.
Ranks are threads.
"""

import math

import torch
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_ring.monitor import RingMonitor
from lightning_ring.monitor.ring_report import LoggedStep, RankMemory, RankRow, RowExchange
from lightning_ring.monitor.step_timeline import StepTimeline
from lightning_ring.monitor.step_times import StepTimes
from lightning_ring.timeline.session import start_session
from lightning_ring.timeline.trace_files import rank_file
from tests.thread_ranks import run_ranks
from tests.trainers import quiet_trainer


def test_a_rank_that_gets_the_table_of_another_reads_all_rows():
    """As after a death (`HostCalls`), when it has exchanged nothing itself."""

    def table(comm):
        row = RankRow(comm.rank, 0.0, StepTimes.unknown(), RankMemory())
        further = [torch.tensor(value + comm.rank).double() for value in (0.0, 8.0)]
        return RowExchange(comm, row, further, torch.device("cpu")).table()

    of_rank_0, _ = run_ranks(2, table)
    report = LoggedStep(3, {}, torch.empty(0), of_rank_0).report()
    assert [row.rank for row in report.rows] == [0, 1]
    assert report.skipped == (0 + 1) / 2
    assert report.gradient_norms == [math.sqrt(8 + 9)]


def test_a_rank_that_could_not_record_lets_the_others_end_their_files(tmp_path):
    path = tmp_path / "trace.json"

    def record_and_stop(comm):
        trainer = quiet_trainer()
        timeline = StepTimeline(path, [])
        timeline.number = 4 + comm.rank
        timeline._trainer, timeline._comm = trainer, comm
        if comm.rank == 0:  # process 5 joined, and could not open its file
            timeline._record_in(
                start_session(path, None, about={}, number=timeline.number),
                trainer,
            )
        timeline.stop()
        assert not timeline.recording

    run_ranks(2, record_and_stop)
    assert rank_file(path, 4).exists()
    assert not path.exists()


class ShowsDeadRank(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 0:
            trainer._logger_connector._progress_bar_metrics["slowest"] = "rank 1 +5 ms"


def test_the_bar_of_the_last_rank_names_no_slowest_one():
    trainer = quiet_trainer(
        callbacks=[ShowsDeadRank(), RingMonitor()], log_every_n_steps=1, max_epochs=1
    )
    trainer.fit(BoringModel(), torch.ones(6, 32))
    assert "data" in trainer.progress_bar_metrics
    assert "slowest" not in trainer.progress_bar_metrics
