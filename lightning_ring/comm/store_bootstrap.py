"""Objects gathered through torch's store, by ranks that have no communicator yet."""

from __future__ import annotations

import json
import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from lightning_ring.comm.calls import describe
from lightning_ring.comm.waiting import CHECK_SECONDS, WaitPolicy

PUBLISHED = "all"  # the key of `publish`
_LONGEST_SLEEP = 0.25  # the store answers all ranks


class StoreBootstrap:
    """``members`` are ranks of the job, numbered in that order. ``store`` is theirs alone
    (`dist.PrefixStore`).
    """

    def __init__(
        self, store: dist.Store, members: Sequence[int], rank: int, policy: WaitPolicy
    ) -> None:
        self.rank = members.index(rank)
        self.world_size = len(members)
        self._store = store
        self._members = members
        self._policy = policy
        self._num_calls = 0

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Everybody's ``obj``, which JSON can carry. An error names the ranks of the job that
        were not here in time.
        """
        self._num_calls += 1
        store = dist.PrefixStore(str(self._num_calls), self._store)
        keys = [str(member) for member in range(self.world_size)]
        store.set(keys[self.rank], json.dumps(obj))
        if self.rank == 0:
            self._wait(store, keys, keys)
            publish(store, keys)
        else:
            self._wait(store, [PUBLISHED], keys)
        return unpack(store.get(PUBLISHED))

    def _wait(self, store: dist.Store, awaited: list[str], keys: list[str]) -> None:
        began = time.monotonic()
        while not store.check(awaited):
            self._policy.check_peers()
            waited = time.monotonic() - began
            if waited > self._policy.seconds:
                here = [store.check([key]) for key in keys]
                missing = [
                    member
                    for member, is_here in zip(self._members, here, strict=True)
                    if not is_here
                ]
                raise self._policy.timeout_error(
                    describe("opening shared memory", f"{self.world_size} ranks"),
                    missing or self._members[:1],
                )
            time.sleep(min(_LONGEST_SLEEP, CHECK_SECONDS / 10 + waited / 4))


def publish(store: dist.Store, keys: list[str]) -> None:
    """Put the values of ``keys``, once they are there, under one key, so that not every rank asks
    for each.
    """
    values = b"[" + b",".join(store.multi_get(keys)) + b"]"
    store.set(PUBLISHED, b64encode(zlib.compress(values)).decode())


def unpack(published: bytes) -> list[Any]:
    """The values that `publish` has put together."""
    return list(json.loads(zlib.decompress(b64decode(published))))
