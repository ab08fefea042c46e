"""The doctor kills a rank for real, and tells whether the other went on."""

import os

import pytest

from lightning_ring.tools.doctor.asking import DoctorRequest
from lightning_ring.tools.doctor.deaths import check

pytestmark = pytest.mark.ranks


def test_a_trial_is_survived():
    (death,) = check(DoctorRequest(4, 3, 30.0))
    assert death.state == "ok", death
    assert "the other rank of a trial knew after" in death.found
    assert check(DoctorRequest(4, 3, 30.0, part=True)) == []


def test_a_trial_that_fails_is_broken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # of which `python -m` imports first
    package = tmp_path / "lightning_ring"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('another package of this name')")
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    death, *_ = check(DoctorRequest(2, 1, 30.0, environ=environ))
    assert death.state == "broken"
    assert "another package of this name" in death.found
    assert "ringrun" in death.advice
