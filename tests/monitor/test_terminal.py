"""Progress in the terminal that mpirun gives its ranks, and where there is none."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from lightning_ring import RingStrategy
from lightning_ring.monitor import RingMonitor
from lightning_ring.monitor.terminal import (
    EpochLines,
    NarrowRich,
    NarrowTQDM,
    narrow,
    replace_bars,
    shown_on_terminal,
    widen_terminal,
)


@pytest.fixture
def terminal(monkeypatch):
    """Makes standard output a new pseudo-terminal of so many columns."""
    opened = []

    def make(columns):
        ours, theirs = pty.openpty()
        opened.extend([ours, theirs])
        make.screen = ours
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        monkeypatch.setattr(sys, "stdout", os.fdopen(theirs, "w", closefd=False))
        return theirs

    yield make
    monkeypatch.undo()
    for descriptor in opened:
        os.close(descriptor)


@pytest.mark.parametrize(("found", "expected"), [(0, 132), (44, 44)])
def test_a_width_of_zero_becomes_columns_and_another_is_kept(
    terminal, monkeypatch, found, expected
):
    monkeypatch.setenv("COLUMNS", "132")
    descriptor = terminal(found)
    widen_terminal()
    assert os.get_terminal_size(descriptor).columns == expected


def test_no_terminal_is_left_alone(monkeypatch, tmp_path):
    with (tmp_path / "out").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        widen_terminal()


def test_mpiruns_terminal_is_none_where_it_leads_into_a_file(terminal, monkeypatch):
    terminal(80)
    assert shown_on_terminal()
    monkeypatch.setenv("PMIX_RANK", "0")
    monkeypatch.setattr(os, "readlink", lambda path: "/home/me/log")
    assert not shown_on_terminal()
    monkeypatch.setattr(os, "readlink", lambda path: "/dev/pts/3")
    assert shown_on_terminal()


class Progress(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).sum()
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_train_epoch_end(self):
        self.print("said by the module")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


@pytest.mark.parametrize("bar", [None, TQDMProgressBar, RichProgressBar])
def test_without_a_terminal_each_epoch_is_a_line(bar, capsys):
    trainer = L.Trainer(
        strategy=RingStrategy(),
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[bar()] if bar is not None else [],
    )
    trainer.fit(Progress(), torch.ones(6, 2))
    output = capsys.readouterr().out
    assert re.findall(
        r"^epoch (\d): 6 batches in \d+\.\d s, loss -?[\d.]+$", output, re.MULTILINE
    ) == ["0", "1"]
    assert output.count("said by the module\n") == 2
    assert "\x1b" not in output
    assert "\r" not in output


def test_a_bar_of_the_users_class_is_left_alone():
    class Own(TQDMProgressBar):
        pass

    trainer = L.Trainer(
        callbacks=[Own()], logger=False, enable_checkpointing=False, accelerator="cpu"
    )
    replace_bars(trainer)
    assert type(trainer.progress_bar_callback) is Own
    trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    replace_bars(trainer)
    assert type(trainer.progress_bar_callback) is EpochLines


MONITORED = {"img/s": "1500", "data": "70%", "comm": "36%", "slowest": "rank 1 +701 ms"}


class Slow(Progress):
    """As a monitor on two ranks would, it shows numbers on the bar; and a metric of validation."""

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).sum()
        self.log("train/loss", loss, prog_bar=True)
        self.trainer._logger_connector._progress_bar_metrics.update(MONITORED)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/accuracy", 0.987, prog_bar=True)


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_bars_of_80_columns_show_loss_metric_one_rate_and_the_slowest_rank(
    bar, terminal, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    terminal(80)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[RingMonitor(), bar()],
    )
    loaders = [torch.utils.data.DataLoader(torch.ones(6, 2)) for _ in range(2)]
    seen = bytearray()

    def read():  # meanwhile, because a terminal holds few bytes
        while b"the end" not in seen:
            seen.extend(os.read(terminal.screen, 4096))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    trainer.fit(Slow(), *loaders)
    print("the end", flush=True)
    reader.join(timeout=60)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode(errors="replace"))
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text)]
    last = max(number for number, line in enumerate(lines) if line.startswith("Epoch 1"))
    shown = " ".join(lines[last : last + 2])  # Rich has two lines
    for item in ("6/6", "loss", "accuracy", "img/s", "1500", "slowest", "1+701ms", "data", "70%"):
        assert item in shown, shown
    assert "it/s" not in shown
    assert all(len(line) <= 80 for line in lines[last : last + 2])


def test_only_lightnings_own_bars_become_narrow():
    class Own(TQDMProgressBar):
        pass

    for given, expected in (
        (TQDMProgressBar, NarrowTQDM),
        (RichProgressBar, NarrowRich),
        (Own, Own),
    ):
        trainer = L.Trainer(
            callbacks=[given(refresh_rate=7)], logger=False, enable_checkpointing=False, devices=1
        )
        narrow(trainer)
        assert type(trainer.progress_bar_callback) is expected
        assert trainer.progress_bar_callback.refresh_rate == 7
