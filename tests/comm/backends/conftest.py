import pytest

from tests.comm.backends.fake_nccl import over_fake_nccl


@pytest.fixture
def open_nccl(monkeypatch):
    """Makes a thread-rank's communicator over a fake of NCCL."""
    return over_fake_nccl(monkeypatch)
