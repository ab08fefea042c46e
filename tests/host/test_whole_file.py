"""A whole file is written through a new one, which follows no link."""

from pathlib import Path

import pytest

from lightning_ring.host.whole_file import write_whole


def test_a_link_in_its_place_is_removed_and_not_followed(tmp_path):
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / "name.part").symlink_to(other)
    write_whole(tmp_path / "name", b"new")
    assert other.read_text() == "mine"
    assert (tmp_path / "name").read_bytes() == b"new"
    assert not (tmp_path / "name").is_symlink()


def test_a_link_that_is_put_there_meanwhile_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "name.part").symlink_to(tmp_path / "other")
    monkeypatch.setattr(Path, "unlink", lambda *arguments, **options: None)
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "name", b"new")
    assert not (tmp_path / "other").exists()
