"""One process changes a set at a time."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

import pytest

from lightning_ring.data.sets import lock
from lightning_ring.data.sets.change import delete_images
from lightning_ring.data.sets.lock import only_one
from lightning_ring.errors import ConfigurationError
from lightning_ring.host import file_lock
from tests.data.sets.daily import draw, pack


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
    thread.join(60)
    assert got.is_set()


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, caplog):
    with only_one(tmp_path / "a", tmp_path):
        assert not caplog.messages
    monkeypatch.setattr(file_lock, "fcntl", None)
    with only_one(tmp_path / "b", tmp_path):
        assert caplog.messages == [
            f"lightning_ring: {tmp_path} has no locks. See to it that one process alone changes it."
        ]


def test_nobody_gets_the_lock_while_what_was_packed_by_is_removed(tmp_path, monkeypatch):
    real, entered, probing = os.unlink, [], False

    def unlink(*arguments, **options):
        nonlocal probing
        real(*arguments, **options)
        if not probing:
            probing = True
            with suppress(ConfigurationError), only_one(tmp_path / "dst/.packing", tmp_path / "dst"):
                entered.append(os.listdir(tmp_path / "dst/.packing"))
            probing = False

    source = draw(tmp_path / "src", {"cat/1.jpg": 1})
    monkeypatch.setattr(os, "unlink", unlink)
    pack(source, tmp_path / "dst")
    pack(draw(source, {"cat/2.jpg": 2}), tmp_path / "dst")
    delete_images(tmp_path / "dst", names=["cat/1.jpg"])
    assert entered
    assert all(names == ["lock"] for names in entered)
    assert not (tmp_path / "dst/.packing").exists()


def test_packing_again_what_is_packed_does_not_disturb_an_append(tmp_path):
    source = draw(tmp_path / "src", {"cat/1.jpg": 1})
    pack(source, tmp_path / "dst", append=False)
    state = tmp_path / "dst/.packing"
    with only_one(state, tmp_path / "dst"):
        (state / "settings.json").write_text('{"generation": 1}')
        pack(source, tmp_path / "dst", append=False)
        assert sorted(os.listdir(state)) == ["lock", "settings.json"]
    (state / "settings.json").write_text('{"generation": 0}')  # as if killed after the manifest
    pack(source, tmp_path / "dst", append=False)
    assert not state.exists()
