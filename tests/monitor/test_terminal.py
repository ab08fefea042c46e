"""Progress in the terminal that mpirun gives its ranks, and where there is none."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from lightning_ring import RingStrategy
from lightning_ring.monitor.terminal import (
    EpochLines,
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
