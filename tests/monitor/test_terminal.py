"""tqdm draws nothing in the 0-column terminal that mpirun gives its ranks."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import sys
import termios

import pytest

from lightning_ring.monitor.terminal import widen_terminal


@pytest.fixture
def terminal(monkeypatch):
    """Makes standard output a new pseudo-terminal of so many columns."""
    opened = []

    def make(columns: int) -> int:
        ours, theirs = pty.openpty()
        opened.extend([ours, theirs])
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        monkeypatch.setattr(sys, "stdout", os.fdopen(theirs, "w", closefd=False))
        return theirs

    yield make
    monkeypatch.undo()
    for descriptor in opened:
        os.close(descriptor)


def test_width_of_zero_becomes_columns(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "132")
    descriptor = terminal(0)
    widen_terminal()
    assert os.get_terminal_size(descriptor).columns == 132


def test_a_width_is_kept(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "132")
    descriptor = terminal(44)
    widen_terminal()
    assert os.get_terminal_size(descriptor).columns == 44


def test_no_terminal_is_left_alone(monkeypatch, tmp_path):
    with (tmp_path / "out").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        widen_terminal()
