"""Monitor and timeline where ranks die and join: a rank may miss an exchange, or record nothing.
Ranks are threads.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch

from lightning_ring.comm.communicator import Communicator
from lightning_ring.monitor.ring_monitor import _exchanged
from lightning_ring.monitor.ring_report import RankMemory, RankRow, RowExchange
from lightning_ring.monitor.step_timeline import StepTimeline
from lightning_ring.monitor.step_times import StepTimes
from lightning_ring.timeline.session import start_session
from lightning_ring.timeline.settings import TimelineSettings
from lightning_ring.timeline.trace_files import rank_file
from tests.thread_ranks import run_ranks


def exchange(comm: Communicator | None) -> RowExchange:
    rank = comm.rank if comm is not None else 1
    on_device = torch.tensor([10.0 + rank], dtype=torch.float64)
    return RowExchange(
        comm, RankRow(rank, 0.0, StepTimes.unknown(), RankMemory()), on_device, torch.device("cpu")
    )


def test_a_rank_that_has_missed_the_end_of_an_exchange_has_all_rows() -> None:
    """It gets what another rank has, after a death (`HostCalls`), and has exchanged nothing
    itself.
    """
    table, _ = run_ranks(2, lambda comm: exchange(comm).table().clone())
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(call_together=lambda run: table))
    rows, sums = _exchanged(trainer, exchange).finish()
    assert [row.rank for row in rows] == [0, 1]
    assert sums.tolist() == [10.0 + 11.0]


def test_a_rank_that_could_not_record_lets_the_others_end_their_files(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    settings = TimelineSettings(path, None, 1.0)

    def record_and_stop(comm: Communicator) -> None:
        trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        timeline = StepTimeline(settings, [])
        timeline.number = 4 + comm.rank
        timeline._trainer, timeline._comm = trainer, comm
        if comm.rank == 0:  # process 5 joined, and could not open its file
            timeline._record_in(
                start_session(path, None, max_bytes=2**20, about={}, number=timeline.number),
                trainer,
            )
        timeline.stop()
        assert not timeline.recording

    run_ranks(2, record_and_stop)
    assert rank_file(path, 4).exists()
    assert not path.exists()
