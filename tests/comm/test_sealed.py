"""What is unpickled was sealed by a rank."""

import pickle

import pytest

from lightning_ring.comm import sealed
from lightning_ring.errors import CollectiveError


class _Loud:
    def __reduce__(self):
        return pytest.fail, ("it was unpickled",)


def test_only_what_was_sealed_with_the_job_s_secret_is_unpickled(monkeypatch):
    monkeypatch.setattr(sealed, "_secret", None)
    monkeypatch.setenv("RING_SECRET", "of the launcher")
    message = sealed.dumps({"a": [1, None]})
    assert sealed.loads(message) == {"a": [1, None]}
    pickled = pickle.dumps(_Loud())
    for forged in (pickled, b"", message[:-1], message[:32] + pickled):
        with pytest.raises(CollectiveError, match="no rank of this job has sealed"):
            sealed.loads(forged)
    sealed.use("another")
    with pytest.raises(CollectiveError, match="RING_SECRET"):
        sealed.loads(message)
