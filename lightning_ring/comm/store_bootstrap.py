"""Objects gathered through torch's store, by ranks that have no communicator yet."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from lightning_ring.comm.calls import describe
from lightning_ring.comm.waiting import CHECK_SECONDS, WaitPolicy


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
        self._store.set(f"{self._num_calls}/{self.rank}", json.dumps(obj))
        keys = [f"{self._num_calls}/{member}" for member in range(self.world_size)]
        until = time.monotonic() + self._policy.seconds
        while not self._store.check(keys):
            self._policy.check_peers()
            if time.monotonic() > until:
                here = [self._store.check([key]) for key in keys]
                missing = [
                    member
                    for member, is_here in zip(self._members, here, strict=True)
                    if not is_here
                ]
                raise self._policy.timeout_error(
                    describe("opening shared memory", f"{self.world_size} ranks"), missing
                )
            time.sleep(CHECK_SECONDS / 10)
        return [json.loads(self._store.get(key)) for key in keys]
