"""The buckets of a model: which parameters share one, and in which order buckets are sent. The same
on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import ClassVar

import torch
from torch.nn import Parameter

from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.cost import Collective, CostModel, fit
from lightning_ring.comm.timing import Mark, now, seconds_between, time_collective
from lightning_ring.gradients.bucket import (
    Bucket,
    Named,
    by_kind,
    cut_buckets,
    make_buckets,
    plan_buckets,
)
from lightning_ring.gradients.compression import Compressor


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
        self.settled = False  # whether it changes no more
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
        if self._auto is None:
            self._order, self.settled = None, True
        return self.settled

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


PROBE_BYTES = (4 * 2**10, 64 * 2**10, 2**20, 4 * 2**20)
PROBE_REPEATS = 5
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class BucketChoice:
    """The measurements and the decision, the same on every rank."""

    order: list[str]  # names of the parameters, in the order of travel
    # of the buckets of each kind of parameter (dtype and device, in the order of first ones)
    ends: list[list[int]]
    cost: CostModel


class AutoBuckets:
    """Notes when gradients are there, and cuts buckets to it once. Rank 0 decides for all.

    A gradient is ready when the slowest rank has it. Parameters of several dtypes are cut one dtype
    at a time, as if each had the wire alone.

    Args:
        say: Called with a description of the choice.
        halves: A reduce-scatter travels during backward, which is timed and priced then; the
            all-gather of parameters under the next forward is taken for its mirror image, and costs
            as much.
        compressor: Gives the size of messages (`Compressor.wire_bytes`).
    """

    def __init__(
        self,
        comm: Communicator,
        say: Callable[[str], None],
        *,
        halves: bool = False,
        compressor: Compressor | None = None,
    ) -> None:
        self._comm = comm
        self._say = say
        self._collective: Collective = "reduce_scatter" if halves else "all_reduce"
        self._compressor = compressor
        self._began: Mark = 0.0
        self._notes: dict[str, list[tuple[Mark, Mark]]] = defaultdict(list)

    def begin_backward(self, device: torch.device) -> None:
        self._began = now(device)

    def note(self, name: str, device: torch.device) -> None:
        """Now the gradient of ``name`` is there."""
        self._notes[name].append((self._began, now(device)))

    def forget(self) -> None:
        """Drop what was noted, of a first backward that warmed up."""
        self._notes.clear()

    def build(self, params: Named) -> list[Bucket]:
        """Measure, choose, say so, and build the buckets. Collective."""
        choice = self._comm.broadcast_object(self._choose(params), name="sizes of buckets")
        by_name = dict(params)
        params = [(name, by_name[name]) for name in choice.order]
        buckets = cut_buckets(params, choice.ends, self._comm.empty, self._comm.world_size)
        self._say(self._in_words(choice, buckets))
        return buckets

    def _choose(self, params: Named) -> BucketChoice:
        comm = self._comm
        own = {
            name: median(seconds_between(*pair, comm) for pair in pairs)
            for name, pairs in self._notes.items()
        }
        everyones = comm.all_gather_object(own, name="times of a backward")
        ready: dict[str, float] = defaultdict(float)
        for times in everyones:
            for name, seconds in times.items():
                ready[name] = max(ready[name], seconds)
        last = max(ready.values(), default=0.0)
        dtype, device = params[0][1].dtype, params[0][1].device
        cost = self._probe(dtype, device)
        position = {name: index for index, (name, _) in enumerate(params)}
        ordered = sorted(params, key=lambda pair: (ready.get(pair[0], last), position[pair[0]]))
        ends = []
        for members in by_kind(ordered):
            sizes = [self._wire_bytes(param) for _, param in members]
            times = [ready.get(name, last) for name, _ in members]
            ends.append(merge(sizes, times, self._seconds(cost)))
        return BucketChoice([name for name, _ in ordered], ends, cost)

    def _probe(self, dtype: torch.dtype, device: torch.device) -> CostModel:
        """Time what travels during backward, in several sizes. On one rank nothing travels, and
        costs nothing.
        """
        if self._comm.world_size == 1:
            return CostModel(0.0, float("inf"))
        sizes, times = list[float](), list[float]()
        for num_bytes in PROBE_BYTES:
            flat = self._comm.empty(num_bytes // dtype.itemsize, dtype, device).zero_()
            sizes += [flat.nbytes] * PROBE_REPEATS
            times += time_collective(
                self._comm, self._collective, flat, PROBE_REPEATS, "probe of the bucket size"
            )
        return fit(sizes, times, self._comm.world_size, collective=self._collective)

    def _seconds(self, cost: CostModel) -> Seconds:
        return lambda num_bytes: cost.seconds(num_bytes, self._comm.world_size, self._collective)

    def _wire_bytes(self, param: Parameter) -> float:
        if self._compressor is None or not self._compressor.accepts(param.dtype):
            return param.nbytes
        compressed = self._compressor.wire_bytes(param.numel(), self._comm.world_size)
        return param.nbytes if compressed is None else compressed

    def _in_words(self, choice: BucketChoice, buckets: Sequence[Bucket]) -> str:
        sizes = ", ".join(f"{bucket.flat.nbytes / _MIB:.3g}" for bucket in buckets)
        cost = choice.cost
        return (
            f'bucket_cap_mb="auto" chose {len(buckets)} bucket(s) of {sizes} MiB. A message costs '
            f"{cost.alpha_seconds * 1e6:.0f} µs and moves {cost.bandwidth / 1e6:.0f} MB/s."
        )


Seconds = Callable[[float], float]
"""Duration of one message, by its bytes; it never falls with size."""


def merge(sizes: Sequence[float], ready: Sequence[float], seconds: Seconds) -> list[int]:
    """Cut gradients into consecutive buckets such that the last one arrives as early as possible,
    in large buckets.

    An arrival depends on the buckets before it through the last one's arrival only, and never falls
    when that rises: so the earliest arrival of each prefix is all that has to be known. Then, from
    the last bucket to the first, each takes as many gradients as it can without moving the end.
    O(number of gradients squared).

    The model is that of MG-WFBP (Shi, Chu and Li, "MG-WFBP: efficient data communication for
    distributed synchronous SGD algorithms", 2019, arXiv:1811.11141): a bucket leaves when its last
    gradient is there and the bucket before it has arrived. MG-WFBP merges a gradient into the next
    one when the wire is busy anyway or waiting costs less than a message's start-up. Here the same
    trade is settled by dynamic programming, which finds the earliest end there is in that model.

    ``sizes`` are bytes in the order of travel, ``ready`` the seconds after which each gradient is
    there; a bucket waits for the latest of its own. Returns for each bucket one past the index of
    its last gradient.
    """
    before = [0.0, *accumulate(sizes)]
    earliest = [0.0]  # by length of the prefix
    for stop in range(1, len(sizes) + 1):
        arrivals, latest = [], 0.0
        for start in range(stop - 1, -1, -1):
            latest = max(latest, ready[start])
            arrivals.append(max(earliest[start], latest) + seconds(before[stop] - before[start]))
        earliest.append(min(arrivals))
    ends: list[int] = []
    stop, deadline = len(sizes), earliest[-1] * (1 + 1e-9)
    while stop > 0:
        ends.append(stop)
        first, latest = stop - 1, 0.0
        for start in range(stop - 1, -1, -1):
            latest = max(latest, ready[start])
            if max(earliest[start], latest) + seconds(before[stop] - before[start]) <= deadline:
                first = start
        deadline -= seconds(before[stop] - before[first])
        stop = first
    return ends[::-1]
