"""Pickled objects with a seal, so that nothing is unpickled that no rank of this job has written.

Gloo's connections authenticate nobody. Whoever has taken a rank's place there can send wrong
numbers, but no program.
"""

from __future__ import annotations

import hmac
import os
import pickle
from typing import Any

from lightning_ring.errors import CollectiveError

_SEAL_BYTES = 32
_secret: str | None = None


def use(secret: str) -> None:
    """Seal with the job's ``secret`` from now on, instead of the one that the launcher gave."""
    global _secret
    _secret = secret


def dumps(obj: Any) -> bytes:
    pickled = pickle.dumps(obj)
    return _seal(pickled) + pickled


def loads(message: bytes) -> Any:
    """The object of `dumps`.

    Raises:
        CollectiveError: It was written without the secret.
    """
    seal, pickled = message[:_SEAL_BYTES], memoryview(message)[_SEAL_BYTES:]
    if not hmac.compare_digest(seal, _seal(pickled)):
        raise CollectiveError(
            "An object arrived that no rank of this job has sealed: a program that is no rank, or "
            "a rank with another RING_SECRET, takes part in its collectives. Give all ranks the "
            "same one."
        )
    return pickle.loads(pickled)


def _seal(pickled: bytes | memoryview) -> bytes:
    secret = os.environ.get("RING_SECRET", "") if _secret is None else _secret
    return hmac.digest(secret.encode(), pickled, "sha256")
