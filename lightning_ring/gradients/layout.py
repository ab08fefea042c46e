"""The buckets of a model: which parameters share one, and in which order buckets are sent. The same
on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.nn import Parameter

from lightning_ring.comm.communicator import Communicator
from lightning_ring.gradients.bucket import Bucket, Named, plan_buckets


class BucketLayout:
    """Buckets in the order given at first, and after the first backward in the order of rank 0's
    gradients.

    A resumed training begins with the order that it had (`restore`).

    ``on_new_bucket`` is called with each bucket before its first use. Old buckets go before memory
    for those that replace them is taken: ``on_replace`` drops the caller's references.

    Attributes:
        buckets: In the order of sending.
        slots: The bucket of each parameter, and the parameter's index in it.
        settled: Whether the buckets are replaced no more.
    """

    def __init__(
        self,
        comm: Communicator,
        cap_mb: float,
        on_new_bucket: Callable[[Bucket], None],
        on_replace: Callable[[], None],
    ) -> None:
        self.settled = False
        self.buckets: list[Bucket] = []
        self.slots: dict[Parameter, tuple[Bucket, int]] = {}
        self._comm = comm
        self._cap_mb = cap_mb
        self._on_new_bucket = on_new_bucket
        self._on_replace = on_replace
        # of the first backward's gradients; None once it was used, or is not wanted
        self._order: list[str] | None = []

    def add(self, params: Named) -> None:
        """Put ``params`` into new buckets, in their order."""
        self._use(plan_buckets(params, self._cap_mb))

    def note(self, name: str) -> None:
        """The gradient of ``name`` is complete."""
        if self._order is not None:
            self._order.append(name)

    def revise(self, num_finished: int) -> bool:
        """Between two backward passes: sort the buckets once there is an order. Collective.

        Returns whether they were replaced.
        """
        if self._order is None or not num_finished:
            return False
        names, self._order = self._order, None
        order = self._comm.broadcast_object(names, name="order of gradients")
        position = {name: index for index, name in enumerate(order)}
        before = self._members()
        after = sorted(before, key=lambda pair: position.get(pair[0], len(position)))
        if after == before:
            return False
        self._replace(plan_buckets(after, self._cap_mb))
        return True

    @property
    def names(self) -> list[list[str]]:
        """Parameter names by bucket, in the order of sending."""
        return [bucket.names for bucket in self.buckets]

    def restore(self, names: Sequence[Sequence[str]]) -> None:
        """Before the first backward, rebuild the buckets of an earlier training.

        Compressors round the gradients of one bucket together. With the same buckets the resumed
        training gets the same bits. Names of another model are ignored.
        """
        members = dict(self._members())
        if sorted(name for group in names for name in group) != sorted(members):
            return
        groups = [[(name, members[name]) for name in group] for group in names]
        self._order = None
        if self.names != [list(group) for group in names]:
            self._replace(groups)

    def settle(self) -> None:
        """Keep the current buckets for good."""
        self._order, self.settled = None, True

    def _replace(self, groups: Sequence[Named]) -> None:
        self.buckets, self.slots = [], {}
        self._on_replace()
        self._use(groups)

    def _use(self, groups: Sequence[Named]) -> None:
        for group in groups:
            names, params = zip(*group, strict=True)
            bucket = Bucket(names, params, self._comm.empty, self._comm.world_size)
            self.buckets.append(bucket)
            self._on_new_bucket(bucket)
            for index, param in enumerate(params):
                self.slots[param] = bucket, index

    def _members(self) -> list[tuple[str, Parameter]]:
        return [
            pair
            for bucket in self.buckets
            for pair in zip(bucket.names, bucket.params, strict=True)
        ]
