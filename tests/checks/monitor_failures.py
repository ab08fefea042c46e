"""`RingMonitor` fails in each of its parts, on one rank or on all: training goes on with the
same numbers.
"""

import warnings
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

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

FORCED = {"force_communication": True}
# what fails, several at a time, each with the part that is left out then; none where a listener is
# told no more
PLACES = (
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
        (dashboard.Dashboard, "add_histograms"): "TensorBoard pages",
    },
    {
        (StepTimer, "_end"): "step times",
        (step_times.StepWindow, "_on_step"): "",
        (RankRow, "from_list"): "report",
    },
)
# what rank 0 alone does
OF_RANK_0 = ("numbers on the progress bar", "TensorBoard pages", "report")


class Planted(Exception):
    pass


def fitted(make, strategy, **arguments):
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


def check_a_failure_in_any_part_leaves_it_out(tmp_path):
    plain, _ = fitted(Classifier, RingStrategy(monitor=False, **FORCED))
    for number, places in enumerate(PLACES):
        for ranks in (range(SIZE), [SIZE - 1]):
            logger = TensorBoardLogger(tmp_path, name=f"{number}", version=len(ranks))
            with planted(places, ranks):
                shown = {"logger": logger, "enable_progress_bar": number == 0}
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


def check_a_batch_that_cannot_be_counted():
    def images(batch):
        raise Planted

    plain, _ = fitted(Classifier, RingStrategy(monitor=False, **FORCED))
    found, said = fitted(
        Classifier, RingStrategy(**FORCED), callbacks=[RingMonitor(batch_size=images)]
    )
    assert torch.equal(found, plain)
    assert len(said) == 1, said


@on_one_rank
def check_a_logger_that_raises_is_the_users_to_see(tmp_path):
    class Broken(CSVLogger):
        def log_metrics(self, *_, **__):
            raise Planted

    with pytest.raises(Planted):
        fitted(Classifier, RingStrategy(**FORCED), logger=Broken(tmp_path))


@contextmanager
def planted(places, ranks):
    """Each of ``places`` raises on ``ranks``."""

    def fail(*_, **__):
        raise Planted

    with ExitStack() as stack:
        for owner, name in places if RANK in ranks else ():
            stack.enter_context(patch.object(owner, name, fail))
        yield


def check_errors_of_communication_pass():
    from lightning_ring.errors import CollectiveError

    def fail(*_):
        raise CollectiveError("planted")

    with pytest.raises(CollectiveError, match="planted"):
        ring_monitor.MonitorFailures().run("part", None, fail)
