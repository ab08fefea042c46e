"""One process changes a set at a time."""

from __future__ import annotations

import threading

import pytest

from lightning_ring.data.sets import lock
from lightning_ring.data.sets.lock import only_one
from lightning_ring.errors import ConfigurationError
from lightning_ring.host import file_lock


def test_a_second_one_is_told_or_waits_and_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(lock, "_PATIENCE", 0.2)
    state, got = tmp_path / ".packing", threading.Event()

    def wait() -> None:
        with only_one(state, tmp_path, wait=True):
            got.set()

    thread = threading.Thread(target=wait)
    with only_one(state, tmp_path):
        with pytest.raises(ConfigurationError, match="another process is packing into"), only_one(state, tmp_path):
            pass
        thread.start()
        assert not got.wait(0.6)
        assert caplog.messages == [f"lightning_ring: waiting for another process that packs into {tmp_path}."]
    thread.join(10)
    assert got.is_set()


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, caplog):
    with only_one(tmp_path / "a", tmp_path):
        assert not caplog.messages
    monkeypatch.setattr(file_lock, "fcntl", None)
    with only_one(tmp_path / "b", tmp_path):
        assert caplog.messages == [
            f"lightning_ring: {tmp_path} has no locks. See to it that one process alone changes it."
        ]
