"""Progress in the terminal that mpirun gives its ranks, and where there is none."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios

import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_ring import RingStrategy
from lightning_ring.monitor.terminal import (
    EpochLines,
    replace_bars,
    shown_on_terminal,
    widen_terminal,
)
from tests.trainers import quiet_trainer


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


class Progress(BoringModel):
    def training_step(self, batch, batch_idx):
        loss = self(batch).sum()
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_train_epoch_end(self):
        self.print("said by the module")


def trainer_with(*bars, **arguments):
    return quiet_trainer(callbacks=list(bars), max_epochs=2, enable_progress_bar=True, **arguments)


@pytest.mark.parametrize("bar", [None, TQDMProgressBar, RichProgressBar])
def test_without_a_terminal_each_epoch_is_a_line(bar, capsys):
    bars = [bar()] if bar is not None else []
    trainer_with(*bars, strategy=RingStrategy()).fit(Progress(), torch.ones(6, 32))
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

    trainer = quiet_trainer(callbacks=[Own()], enable_progress_bar=True)
    replace_bars(trainer)
    assert type(trainer.progress_bar_callback) is Own
    trainer = quiet_trainer(enable_progress_bar=True)
    replace_bars(trainer)
    assert type(trainer.progress_bar_callback) is EpochLines
