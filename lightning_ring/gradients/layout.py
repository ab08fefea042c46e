"""The buckets of a model: which parameters share one, and in which order buckets are sent. The
same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import ClassVar

import torch
from torch.nn import Parameter

from lightning_ring.comm.communicator import Communicator
from lightning_ring.gradients.bucket import Bucket, make_buckets, plan_buckets
from lightning_ring.gradients.sizing.auto_buckets import AutoBuckets


class BucketLayout:
    """Buckets in the order given at first, and after the first backward in the order of rank 0's
    gradients.

    A resumed training begins with the order that it had (`restore`).

    With ``auto``, which measures, sizes and order change once more, after `backwards_before_auto`
    backward passes. ``on_new_bucket`` is called with each bucket before its first use. Old buckets
    go before memory for those that replace them is taken: ``on_replace`` drops the caller's
    references.

    Attributes:
        buckets: In the order of sending.
        slots: The bucket of each parameter, and the parameter's index in it.
    """

    backwards_before_auto: ClassVar[int] = 4  # the first warms up; the others are measured

    def __init__(
        self,
        comm: Communicator,
        cap_mb: float,
        auto: AutoBuckets | None,
        on_new_bucket: Callable[[Bucket], None],
        on_replace: Callable[[], None] = lambda: None,
    ) -> None:
        self.buckets: list[Bucket] = []
        self.slots: dict[Parameter, tuple[Bucket, int]] = {}
        self._comm = comm
        self._cap_mb = cap_mb
        self._auto = auto
        self._on_new_bucket = on_new_bucket
        self._on_replace = on_replace
        # of the first backward's gradients; None once it was used
        self._order: list[str] | None = []

    def add(self, params: Sequence[tuple[str, Parameter]]) -> None:
        """Put ``params`` into new buckets, in their order."""
        self._use(self._plan(params))

    def remove(self, params: Container[Parameter]) -> None:
        """Rebuild the buckets without ``params``."""
        rest = [(name, param) for name, param in self._members() if param not in params]
        self._replace(lambda: self._plan(rest))

    def begin_backward(self) -> None:
        if self._auto is not None and self.buckets:
            self._auto.begin_backward(self.buckets[0].flat.device)

    def note(self, name: str, device: torch.device) -> None:
        """The gradient of ``name`` is complete."""
        if self._order is not None:
            self._order.append(name)
        if self._auto is not None:
            self._auto.note(name, device)

    def revise(self, num_finished: int) -> bool:
        """Between two backward passes: replace the buckets where sizes or order change. Collective.

        Returns whether they were replaced.
        """
        if self._auto is not None and num_finished >= self.backwards_before_auto:
            auto, self._auto, self._order = self._auto, None, None
            if not self.buckets:  # all gradients are sparse
                return False
            members = self._members()
            self._replace(lambda: auto.build(members))
            return True
        if self._order is not None and num_finished:
            order, self._order = self._order, None
            if self._auto is not None:
                self._auto.forget()  # the first backward is slower than all that follow
            return self._sort(self._comm.broadcast_object(order, name="order of gradients"))
        return False

    @property
    def names(self) -> list[list[str]]:
        """Parameter names by bucket, in the order of sending. Empty until ``auto`` has chosen."""
        return [list(bucket.names) for bucket in self.buckets] if self._auto is None else []

    def restore(self, names: Sequence[Sequence[str]]) -> None:
        """Before the first backward, rebuild the buckets of an earlier training.

        Compressors round the gradients of one bucket together. With the same buckets the resumed
        training gets the same bits. Names of another model are ignored.
        """
        members = dict(self._members())
        if sorted(name for group in names for name in group) != sorted(members):
            return
        groups = [[(name, members[name]) for name in group] for group in names]
        self._auto = self._order = None
        if [list(bucket.names) for bucket in self.buckets] != [list(group) for group in names]:
            self._replace(lambda: make_buckets(groups, self._comm.empty, self._comm.world_size))

    def settle(self) -> bool:
        """Keep the current layout for good. Returns False if ``auto`` has yet to choose sizes."""
        if self._auto is not None:
            return False
        self._order = None
        return True

    def _sort(self, order: Sequence[str]) -> bool:
        position = {name: index for index, name in enumerate(order)}
        before = self._members()
        after = sorted(before, key=lambda pair: position.get(pair[0], len(position)))
        if [name for name, _ in after] == [name for name, _ in before]:
            return False
        self._replace(lambda: self._plan(after))
        return True

    def _plan(self, params: Sequence[tuple[str, Parameter]]) -> list[Bucket]:
        return plan_buckets(
            params, self._cap_mb, empty=self._comm.empty, num_shards=self._comm.world_size
        )

    def _replace(self, build: Callable[[], Sequence[Bucket]]) -> None:
        self.buckets, self.slots = [], {}
        self._on_replace()
        self._use(build())

    def _use(self, buckets: Sequence[Bucket]) -> None:
        self.buckets += buckets
        for bucket in buckets:
            self._on_new_bucket(bucket)
            for index, param in enumerate(bucket.params):
                self.slots[param] = bucket, index

    def _members(self) -> list[tuple[str, Parameter]]:
        return [
            pair
            for bucket in self.buckets
            for pair in zip(bucket.names, bucket.params, strict=True)
        ]
