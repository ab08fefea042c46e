"""Bucket sizes from measurements: the times of gradients in backward, and the cost of a message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch.nn import Parameter

from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.cost import DEFAULT_CAP_MB, Collective, CostModel, fit
from lightning_ring.comm.timing import Mark, now, seconds_between, time_collective
from lightning_ring.gradients.bucket import Bucket, Named, by_kind, cut_buckets, ends_by_size
from lightning_ring.gradients.compression import Compressor
from lightning_ring.gradients.sizing.merge import Seconds, last_arrival, merge

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
    seconds_exposed: float  # predicted, from the last gradient until the last bucket has arrived
    seconds_exposed_fixed: float  # the same with buckets of ``default_cap_mb``


class AutoBuckets:
    """Notes when gradients are there, and cuts buckets to it once. Rank 0 decides for all.

    A gradient is ready when the slowest rank has it. Parameters of several dtypes are cut one dtype
    at a time, as if each had the wire alone.

    Args:
        say: Called with a description of the choice.
        default_cap_mb: Bucket size in MiB until then, and the one that the choice is compared with.
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
        default_cap_mb: float = DEFAULT_CAP_MB,
        halves: bool = False,
        compressor: Compressor | None = None,
    ) -> None:
        self._comm = comm
        self._say = say
        self._default_cap_mb = default_cap_mb
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
        ends, exposed, fixed = [], 0.0, 0.0
        for members in by_kind(ordered):
            sizes = [self._wire_bytes(param) for _, param in members]
            times = [ready.get(name, last) for name, _ in members]
            chosen = merge(sizes, times, self._seconds(cost))
            ends.append(chosen)
            exposed = max(exposed, last_arrival(chosen, sizes, times, self._seconds(cost)) - last)
            usual = ends_by_size([param for _, param in members], self._default_cap_mb)
            fixed = max(fixed, last_arrival(usual, sizes, times, self._seconds(cost)) - last)
        return BucketChoice([name for name, _ in ordered], ends, cost, exposed, fixed)

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
        cost, fixed = choice.cost, 1e3 * choice.seconds_exposed_fixed
        return (
            f'bucket_cap_mb="auto" chose {len(buckets)} bucket(s) of {sizes} MiB. A message costs '
            f"{cost.alpha_seconds * 1e6:.0f} µs and moves {cost.bandwidth / 1e6:.0f} MB/s; "
            f"predicted: the last gradients arrive {choice.seconds_exposed * 1e3:.1f} ms after "
            f"backward, {fixed:.1f} ms with buckets of {self._default_cap_mb:g} MiB."
        )
