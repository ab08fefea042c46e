"""`RingMonitor` on real ranks: what it says is compared with what was planted, and training with
what it is without.
"""

import csv
import time
from pathlib import Path

import lightning as L
import torch
import yaml
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from mpi4py import MPI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ring import RingStrategy
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.monitor import RingMonitor
from lightning_ring.optim import LARS
from tests.checks.marks import by_world_size
from tests.checks.models import (
    RANK,
    SIZE,
    Classifier,
    assert_all_ranks_equal,
    data,
    loader,
    parameters,
    trainer,
)
from tests.strategies import ring

SLEEP = 0.1  # seconds, where a step takes some thousandths
FORCED = {"force_communication": True}  # so that one rank communicates too


class Quiet(Classifier):
    """Without `self.log`, so that gradients are all that travels."""

    def training_step(self, batch, batch_idx):
        self.seen["loss"].append(self.loss(batch).detach())
        return self.loss(batch)


class Sleepy(Classifier):
    """The last rank sleeps in forward, and all log with ``sync_dist``, where the others wait for
    it too.
    """

    def training_step(self, batch, batch_idx):
        time.sleep(SLEEP * (RANK == SIZE - 1))
        return super().training_step(batch, batch_idx)


class Adversarial(L.LightningModule):
    """Manual optimization, two optimizers, of which the second steps every other batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.one, self.other = nn.Linear(8, 4), nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        optimizers = self.optimizers()
        for optimizer, net in zip(optimizers, (self.one, self.other), strict=True):
            if net is self.other and batch_idx % 2:
                continue
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(net(batch[0]).square().mean())
            time.sleep(0.002)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.one.parameters(), 0.1),
            torch.optim.Adam(self.other.parameters(), 0.1),
        ], []


class SlowLoader(TensorDataset):
    def __getitem__(self, index):
        time.sleep(SLEEP / 4)  # a batch has four
        return super().__getitem__(index)


class Buckets(L.Callback):
    """Sizes of the buckets, which are gone when a fit is."""

    def on_train_end(self, run, module):
        buckets = run.strategy.algorithm.reducer.buckets
        self.nbytes = sum(bucket.flat.nbytes for bucket in buckets)
        self.flags = sum(len(bucket.params) + 1 for bucket in buckets)


def monitored(module, train=None, strategy=None, **arguments):
    """The last report of a fit in which every step is logged."""
    strategy = RingStrategy(**FORCED) if strategy is None else strategy
    run = trainer(strategy, **({"max_epochs": 1, "log_every_n_steps": 1} | arguments))
    run.fit(module, loader() if train is None else train)
    report = monitor_of(run).report
    assert report is not None
    return report


def monitor_of(run):
    (found,) = [one for one in run.callbacks if isinstance(one, RingMonitor)]
    return found


def parts(report, rank):
    times = report.rows[rank].times
    return (
        times.data
        + times.copy
        + times.forward
        + times.backward
        + times.exposed
        + times.optimizer
        + times.other
    )


@by_world_size
class Scheduled(Quiet):
    """Step k is taken with learning rate k + 1."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step + 1.0)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def check_the_learning_rate_of_a_step_is_the_one_that_it_was_taken_with():
    report = monitored(Scheduled())
    assert report.learning_rates == ({"SGD": report.step + 1.0} if RANK == 0 else {})


def check_a_rank_that_sleeps_is_named_slowest_with_its_sleep():
    report = monitored(Sleepy(), log_every_n_steps=4)
    rank, behind = report.slowest
    assert rank == SIZE - 1
    if SIZE > 1:
        assert behind > 0.5 * SLEEP, report
        assert report.rows[0].times.exposed > 0.5 * SLEEP, "rank 0 waits for it"
        assert report.rows[0].times.forward < 0.5 * SLEEP, (
            "which is no time of its forward, though it waits there"
        )
        assert "slowest" in report.bar()


def check_every_rank_has_the_same_report_and_its_parts_add_up():
    for strategy in (ring(False, **FORCED), ring(True, **FORCED)):
        report = monitored(Classifier(), strategy=strategy, log_every_n_steps=3)
        assert [row.rank for row in report.rows] == list(range(SIZE))
        assert_all_ranks_equal(
            torch.tensor([list(row.as_list()) for row in report.rows], dtype=torch.float64)
        )
        for rank in range(SIZE):
            total = report.rows[rank].times.total
            assert total > 0
            assert abs(parts(report, rank) - total) < 1e-6 * total
        assert report.rows[0].times.images == 4
        assert (
            abs(report.images_per_second - 4 * SIZE / max(row.times.total for row in report.rows))
            < 1e-6
        )
        assert report.scalars()["ring/hidden_communication_ms"] >= 0


@by_world_size
def check_bytes_on_the_wire_are_those_of_the_buckets():
    for sharded in (False, True):
        buckets = Buckets()
        strategy = ring(sharded, **FORCED)
        report = monitored(Quiet(), strategy=strategy, callbacks=[buckets], max_epochs=2)
        flags = 4 * (buckets.flags + 3) if sharded else 0  # and three numbers that ranks compare
        expected = 2 * (SIZE - 1) / SIZE * (buckets.nbytes + flags)
        assert abs(report.rows[RANK].times.sent - expected) <= 1e-9 * expected


def check_a_slow_loader_shows_as_data_wait():
    report = monitored(Quiet(), DataLoader(SlowLoader(*data(48).tensors), batch_size=4))
    assert all(row.times.data > 0.9 * SLEEP for row in report.rows)
    assert report.data_share > 0.9 * SLEEP / max(row.times.total for row in report.rows)
    assert report.bar()["data"] == f"{report.data_share:.0%}"


def check_training_is_bit_identical_without_it():
    for arguments in ({}, {"algorithm": Sharded()}, {"uneven": "join"}):
        for settings in ({}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}):
            trained = []
            for monitor in (True, False):
                L.seed_everything(5, verbose=False)
                module = Classifier(batch_norm=True, dropout=0.2)
                num = 40 + 8 * (RANK == 0) * ("uneven" in arguments)
                run = trainer(
                    RingStrategy(monitor=monitor, **FORCED, **arguments),
                    log_every_n_steps=1,
                    **settings,
                )
                run.fit(module, loader(num))
                trained.append(module)
                assert any(isinstance(one, RingMonitor) for one in run.callbacks) == monitor
            assert torch.equal(*map(parameters, trained))
            assert all(map(torch.equal, trained[0].seen["loss"], trained[1].seen["loss"]))


@by_world_size
def check_gradient_norm_is_that_of_the_averages():
    for sharded in (False, True):
        L.seed_everything(6, verbose=False)
        module, reference = Classifier(), Classifier()
        reference.load_state_dict(module.state_dict())
        whole = trainer(RingStrategy(monitor=False, **FORCED), max_epochs=1)
        whole.fit(reference, loader())
        report = monitored(module, strategy=ring(sharded, bucket_cap_mb=0.0003, **FORCED))
        (norm,) = report.gradient_norms
        expected = float(reference.seen["gradient"][-1].norm())
        assert norm is not None
        assert abs(norm - expected) < 1e-5 * expected, (norm, expected)


def check_manual_optimization_with_two_optimizers():
    for sharded in (False, True):
        report = monitored(Adversarial(), strategy=ring(sharded, **FORCED))
        norms = report.gradient_norms
        assert len(norms) == 2
        assert all(norm is None or norm > 0 for norm in norms)
        assert norms[0] is not None
        assert sorted(report.learning_rates) == (["Adam", "SGD"] if RANK == 0 else [])
        times = report.rows[RANK].times
        assert times.backward > 0
        assert times.forward >= 0.002, "the sleep between backward and step is left"
        assert abs(parts(report, RANK) - times.total) < 1e-6 * times.total


def check_all_kinds_of_fits(tmp_path):
    module = Classifier()
    run = trainer(RingStrategy(**FORCED), max_epochs=1, log_every_n_steps=2, limit_train_batches=5)
    run.fit(module, loader())
    run.fit_loop.max_epochs = 2
    run.fit(module, loader(), loader(8))  # again, with a validation
    assert monitor_of(run).report.step == 9 if SIZE < 3 else monitor_of(run).report is not None
    assert not run.strategy.listeners, "nothing listens between two fits"
    run.validate(module, loader(8), verbose=False)
    for arguments in (
        {"fast_dev_run": True},
        {"max_steps": 0},
        {"logger": CSVLogger(tmp_path, name=f"csv{RANK}")},
        {"val_check_interval": 2, "logger": TensorBoardLogger(tmp_path, name=f"tb{RANK}")},
        {"accumulate_grad_batches": 3},
    ):
        run = trainer(
            RingStrategy(**FORCED), **({"max_epochs": 1, "log_every_n_steps": 1} | arguments)
        )
        run.fit(Quiet(), loader(), loader(8))
        assert (monitor_of(run).report is not None) == ("max_steps" not in arguments), arguments
    bare = L.Trainer(
        strategy=RingStrategy(**FORCED), accelerator="cpu", max_epochs=1, barebones=True
    )
    bare.fit(Quiet(), loader())
    assert not any(isinstance(one, RingMonitor) for one in bare.callbacks)


@by_world_size
def check_only_one_is_added_and_none_where_nothing_communicates():
    mine = RingMonitor()
    run = trainer(RingStrategy(**FORCED), max_epochs=1, callbacks=[mine])
    run.fit(Classifier(), loader())
    assert monitor_of(run) is mine
    run = trainer(RingStrategy(), max_epochs=1)
    run.fit(Classifier(), loader())
    assert any(isinstance(one, RingMonitor) for one in run.callbacks) == (SIZE > 1)


def check_steps_of_loggers_agree_and_nothing_else_is_touched(tmp_path):
    bar = TQDMProgressBar()
    logger = CSVLogger(tmp_path, name="logs", version=0)
    run = trainer(
        RingStrategy(**FORCED),
        max_epochs=1,
        log_every_n_steps=2,
        logger=logger,
        callbacks=[bar],
        enable_progress_bar=True,
    )
    run.fit(Classifier(), loader())
    ours = {
        name for name in (*run.callback_metrics, *run.logged_metrics) if name.startswith("ring/")
    }
    assert not ours
    if RANK:
        return
    assert {"img/s", "data", "comm"} <= bar.get_metrics(run, run.lightning_module).keys()
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    theirs = [int(row["step"]) for row in rows if row.get("loss_step")]
    assert [int(row["step"]) for row in rows if row["ring/step_ms"]] == theirs


def check_skipped_steps_are_counted():
    class Overflowing(Classifier):
        def __init__(self, optimizer):
            super().__init__()
            self.optimizer = optimizer

        def training_step(self, batch, batch_idx):
            return self.loss(batch) * (float("inf") if batch_idx == 1 else 1.0)

        def configure_optimizers(self):
            if self.optimizer == "LARS":
                return LARS(self.parameters(), lr=0.1, skip_nonfinite=True)
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for sharded in (False, True):
        strategy = ring(sharded, **FORCED)
        report = monitored(Overflowing("LARS"), strategy=strategy)
        assert report.skipped == 1
        assert RANK or report.trust_ratios.numel() == 4
        assert RANK or {"ring/trust_ratio/p05", "ring/trust_ratio/p95"} <= report.scalars().keys()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    assert monitored(Overflowing("SGD"), plugins=[plugin]).skipped == 1


def check_tensorboard_pages_are_written(tmp_path):
    class Named(Classifier):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters({"width": 16, "api_key": "k3y"})

        def configure_optimizers(self):
            return LARS(self.parameters(), lr=0.1)

    logger = TensorBoardLogger(tmp_path, name="logs", version=0)
    monitored(Named(), logger=logger, log_every_n_steps=2)
    MPI.COMM_WORLD.Barrier()
    if RANK:
        return
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2
    from tensorboard.plugins.hparams import plugin_data_pb2

    events = EventAccumulator(
        logger.log_dir, size_guidance={"scalars": 0, "histograms": 0}
    ).Reload()
    layout = layout_pb2.Layout()
    layout.ParseFromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    assert [one.title for one in layout.category] == [
        "Training",
        "Throughput",
        "Communication",
        "Data",
        "Optimizer",
    ]
    tags = events.Tags()
    assert {"ring/images_per_second", "ring/trust_ratio/p50", "ring/lr/LARS"} <= set(
        tags["scalars"]
    )
    assert "ring/skipped_steps" not in tags["scalars"], "what is always 0 gets no chart"
    assert set(tags["histograms"]) == {"ring/trust_ratio"}
    (environment,) = events.Tensors("ring/environment/text_summary")
    assert (
        f"(ranks {', '.join(map(str, range(SIZE)))})".encode()
        in environment.tensor_proto.string_val[0]
    ), "hosts"
    assert events.Scalars("ring/world_size")[0].value == SIZE
    assert events.Tensors("ring/end/text_summary")[0].tensor_proto.string_val == [b"finished"]
    content = plugin_data_pb2.HParamsPluginData()
    content.ParseFromString(
        events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    )
    shown = content.session_start_info.hparams
    assert shown["width"].number_value == 16, "the module's own are there too"
    assert shown["api_key"].string_value == "***"
    assert shown["ring/world_size"].number_value == SIZE
    assert shown["ring/optimizer"].string_value == "LARS"
    assert shown["ring/batch_size"].number_value == 4 * SIZE
    written = yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text())
    assert written["ring/timeout"] == shown["ring/timeout"].number_value > 0
