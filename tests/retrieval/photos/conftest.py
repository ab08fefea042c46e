from __future__ import annotations

import sys

import pytest

from lightning_ring.cli.main import main
from tests.images import write_folder
from tests.retrieval.photos.models import NAME, save


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working folder: ``model.ckpt``, and ``photos/c0/0.jpg`` and so on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_folder(tmp_path / "photos")
    save(tmp_path / "model.ckpt")
    return tmp_path


@pytest.fixture
def indexed(here):
    """The same, with ``photographs.index`` of the 21 photographs."""
    assert main(["index", "model.ckpt", "photos", "--model", NAME, "--size", "32"]) == 0
    return here


@pytest.fixture
def refused(here, capsys):
    """What a command prints that cannot work: one line."""

    def says(*words: str) -> str:
        capsys.readouterr()
        assert main(words) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.count("\n") == 1
        return said.err

    return says
