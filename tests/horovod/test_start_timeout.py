"""HOROVOD_START_TIMEOUT."""

import threading
import time

import pytest

from lightning_ring.errors import ConfigurationError
from lightning_ring.horovod import variables
from lightning_ring.horovod.variables import within_start_timeout


def test_ranks_that_do_not_meet_in_time_end(monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(variables, "end_process", codes.append)
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "0.05")
    with within_start_timeout():
        time.sleep(0.5)
    assert codes == [1]
    assert "has waited 0.05 s for the other ranks" in capsys.readouterr().err
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "600")
    before = set(threading.enumerate())
    with within_start_timeout():
        (timer,) = set(threading.enumerate()) - before
    timer.join(60)
    assert not timer.is_alive(), "it would end the process later"
    assert codes == [1]


def test_a_time_that_is_none(monkeypatch):
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "soon")
    told = "HOROVOD_START_TIMEOUT='soon': expected a number of seconds above 0"
    with pytest.raises(ConfigurationError, match=told):
        within_start_timeout().__enter__()
