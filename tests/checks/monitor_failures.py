"""`RingMonitor` fails in each of its parts, on one rank or on all: training goes on with the
same numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn

from lightning_ring import RingStrategy
from lightning_ring.monitor import RingMonitor, dashboard, ring_monitor, step_times
from lightning_ring.monitor.ring_report import RankMemory, RankRow, RingReport, SkippedSteps
from lightning_ring.monitor.step_times import StepTimer
from tests.checks.marks import on_one_rank
from tests.checks.models import (
    RANK,
    SIZE,
    Classifier,
    assert_all_ranks_equal,
    loader,
    parameters,
    trainer,
)
from tests.strategies import ring

FORCED: dict[str, Any] = {"force_communication": True}
# what fails, several at a time, each with the part that is left out then; none where a listener is
# told no more
PLACES: tuple[dict[tuple[Any, str], str], ...] = (
    {
        (StepTimer, "_begin"): "step times",
        (ring_monitor, "gradient_squares"): "gradient norms",
        (ring_monitor, "learning_rates"): "numbers of the optimizers",
        (RankMemory, "now"): "memory",
        (SkippedSteps, "count"): "skipped steps",
        (RingReport, "bar"): "numbers on the progress bar",
        (dashboard.Dashboard, "record_start"): "TensorBoard pages",
    },
    {
        (SkippedSteps, "__init__"): "skipped steps",
        (ring_monitor, "trust_ratios"): "numbers of the optimizers",
        (RingReport, "scalars"): "report",
        (dashboard.Dashboard, "__init__"): "TensorBoard pages",
    },
    {
        (step_times, "break_down"): "step times",
        (step_times.StepWindow, "_on_collective"): "",
        (dashboard, "draw"): "TensorBoard pages",
    },
    {
        (StepTimer, "_end"): "step times",
        (step_times, "collectives_of"): "",
        (RankRow, "from_list"): "report",
    },
)
# what rank 0 alone does
OF_RANK_0 = ("numbers on the progress bar", "TensorBoard pages", "report")


class Planted(Exception):
    pass


class TwoOptimizers(L.LightningModule):
    """Buckets are laid out anew between the optimizers' steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first = nn.Linear(8, 16)
        self.second = nn.ModuleList([nn.Linear(16, 40), nn.Linear(8, 40), nn.Linear(40, 4)])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            hidden = self.second[1](batch[0]) + self.second[0](self.first(batch[0]))
            self.manual_backward(self.second[2](torch.relu(hidden)).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.first, self.second)], []


def fitted(
    make: type[L.LightningModule], strategy: RingStrategy, **arguments: Any
) -> tuple[Tensor, list[str]]:
    """Parameters after a fit of four steps, and this rank's warnings."""
    run = trainer(
        strategy,
        **({"max_epochs": 1, "limit_train_batches": 4, "log_every_n_steps": 1} | arguments),
    )
    torch.manual_seed(3)
    module = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(module, loader())
    values = parameters(module)
    assert_all_ranks_equal(values)
    return values, [str(one.message) for one in caught if "monitor" in str(one.message)]


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found, expected)


def check_two_optimizers_whose_buckets_are_laid_out_anew() -> None:
    for sharded in (False, True):
        asked: dict[str, Any] = {"bucket_cap_mb": 0.0005, **FORCED}
        plain, _ = fitted(TwoOptimizers, ring(sharded, monitor=False, **asked))
        monitor = RingMonitor()
        found, said = fitted(TwoOptimizers, ring(sharded, **asked), callbacks=[monitor])
        assert_same(found, plain)
        assert not said, "nothing failed"
        assert monitor.report is not None
        assert all(norm is not None for norm in monitor.report.gradient_norms)


def check_a_failure_in_any_part_leaves_it_out(tmp_path: Path) -> None:
    plain, _ = fitted(Classifier, RingStrategy(monitor=False, **FORCED))
    for number, places in enumerate(PLACES):
        for ranks in (range(SIZE), [SIZE - 1]):
            logger = TensorBoardLogger(tmp_path, name=f"{number}", version=len(ranks))
            with planted(places, ranks):
                shown: dict[str, Any] = {"logger": logger, "enable_progress_bar": number == 0}
                found, said = fitted(Classifier, RingStrategy(**FORCED), **shown)
            assert torch.equal(found, plain), (places, ranks)
            for part in filter(None, places.values()):
                everywhere = part not in OF_RANK_0 or (RankRow, "from_list") in places
                once = [
                    text for text in said if f"on rank {RANK} and leaves out its {part}" in text
                ]
                assert len(once) == (RANK in ranks and (everywhere or RANK == 0)), (
                    part,
                    ranks,
                    said,
                )


def check_a_batch_that_cannot_be_counted() -> None:
    def images(batch: Any) -> int:
        raise Planted

    plain, _ = fitted(Classifier, RingStrategy(monitor=False, **FORCED))
    found, said = fitted(
        Classifier, RingStrategy(**FORCED), callbacks=[RingMonitor(batch_size=images)]
    )
    assert_same(found, plain)
    assert len(said) == 1, said


@on_one_rank
def check_a_logger_that_raises_is_the_users_to_see(tmp_path: Path) -> None:
    class Broken(CSVLogger):
        def log_metrics(self, *_: Any, **__: Any) -> None:
            raise Planted

    with pytest.raises(Planted):
        fitted(Classifier, RingStrategy(**FORCED), logger=Broken(tmp_path))


@contextmanager
def planted(places: Iterable[tuple[Any, str]], ranks: Sequence[int]) -> Iterator[None]:
    """Each of ``places`` raises on ``ranks``."""

    def fail(*_: Any, **__: Any) -> Any:
        raise Planted

    with ExitStack() as stack:
        for owner, name in places if RANK in ranks else ():
            stack.enter_context(patch.object(owner, name, fail))
        yield


def check_errors_of_communication_pass() -> None:
    from lightning_ring.errors import CollectiveError

    def fail(*_: Any) -> Any:
        raise CollectiveError("planted")

    with pytest.raises(CollectiveError, match="planted"):
        ring_monitor.MonitorFailures().run("part", None, fail)
