"""Times collectives: all backends take turns at one size, and every result is checked against
known sums.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_ring.comm.communicator import Communicator, shard
from lightning_ring.comm.cost import PASSES
from lightning_ring.errors import CollectiveError
from lightning_ring.host.accelerator import is_gpu, synchronize
from lightning_ring.tools.bench import COPY
from lightning_ring.tools.bench.contenders import Collectives

TURNS = 5
MOST_CALLS = 200  # a turn
_PERIOD = 65_521  # prime: a shard that lands in another's place does not look right by chance


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a call on its slowest rank, over ``num_calls``; ``num_bytes`` is the whole
    tensor, on each rank.
    """

    collective: str
    backend: str
    num_bytes: int
    median: float
    least: float
    p95: float
    num_calls: int

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes a second."""
        return self.num_bytes / self.median

    def bus_bandwidth(self, world_size: int) -> float:
        """Bytes a second over each link of a ring, as nccl-tests define it (doc/PERFORMANCE.md)."""
        if self.backend == COPY:
            return self.algorithm_bandwidth
        passes = PASSES[self.collective]
        return self.algorithm_bandwidth * passes * (world_size - 1) / world_size


def measure(
    contenders: Mapping[str, Collectives],
    control: Communicator,
    device: torch.device,
    collective: str,
    sizes: Sequence[int],
    seconds: float,
) -> Iterator[list[Timing]]:
    """One list of timings for each of ``sizes`` (bytes): the copy first, then the contenders.
    Collective.

    ``control``, any communicator of these ranks, agrees on the number of calls and collects the
    times. On CUDA calls are queued as in training and timed in batches. Sizes are rounded down to a
    multiple of 4·world size bytes. ``seconds`` is the approximate time of a contender at one size,
    which gets at least `TURNS` calls. Raises `CollectiveError` if a result is wrong.
    """
    world_size = control.world_size
    sums = torch.stack([_block(rank) for rank in range(world_size)]).sum(0)
    for size in sizes:
        numel = max(1, size // (4 * world_size)) * world_size
        total = repeated(sums, numel, device)
        entries = [
            _Entry(name, own, collective, own.empty(numel, torch.float32, device), total)
            for name, own in contenders.items()
        ]
        calls: dict[str, Callable[[], object]] = {COPY: partial(total.clone().copy_, total)}
        for each in entries:
            calls[each.name] = each.call
            each.verify(control)
        batches = {
            name: _calls_a_turn(call, control, device, seconds) for name, call in calls.items()
        }
        times: dict[str, list[float]] = defaultdict(list)
        order = list(calls)
        for _ in range(TURNS):
            for name in order:
                control.barrier()
                times[name] += timed(calls[name], batches[name], device)
            order.append(order.pop(0))
        for each in entries:
            each.verify(control)
        by_rank = control.all_gather_object(times)
        found = []
        for name in calls:
            # of each call the slowest rank's
            longest = sorted(map(max, zip(*(own[name] for own in by_rank), strict=True)))
            count, middle = len(longest), statistics.median(longest)
            p95 = longest[int(0.95 * count)]
            found.append(Timing(collective, name, total.nbytes, middle, longest[0], p95, count))
        yield found


@dataclass(frozen=True, slots=True)
class _Entry:
    """One backend's collective on its own memory."""

    name: str
    contender: Collectives
    collective: str
    flat: Tensor
    total: Tensor

    def call(self) -> None:
        getattr(self.contender, f"{self.collective}_")(self.flat).wait()

    def verify(self, control: Communicator) -> None:
        """Run it on numbers whose sums float32 holds exactly. Leaves zeros, which stay zeros
        however often summed.
        """
        world_size, own = control.world_size, self.contender.shard_index
        if self.collective == "all_gather":
            self.flat.fill_(-1)
            shard(self.flat, world_size, own).copy_(shard(self.total, world_size, own))
        else:
            self.flat.copy_(repeated(_block(control.rank), self.flat.numel(), self.flat.device))
        control.barrier()
        self.call()
        found, expected = self.flat, self.total
        if self.collective == "reduce_scatter":
            found, expected = shard(found, world_size, own), shard(expected, world_size, own)
        wrong = int((found != expected).sum())
        if wrong:
            raise CollectiveError(
                f"{self.name}: {self.collective} of {self.flat.numel()} float32 left {wrong} of "
                f"{found.numel()} elements wrong on rank {control.rank}. Its times mean nothing; "
                "please report this."
            )
        self.flat.zero_()


def _block(rank: int) -> Tensor:
    """Whole numbers from 0 to 3, different on each rank."""
    return ((torch.arange(_PERIOD) * 2_654_435_761 + rank * 40_503) >> 7 & 3).float()


def repeated(block: Tensor, numel: int, device: torch.device) -> Tensor:
    flat = torch.empty(numel, device=device)
    whole = numel // _PERIOD * _PERIOD
    flat[:whole].view(-1, _PERIOD).copy_(block)
    flat[whole:].copy_(block[: numel - whole])
    return flat


def _calls_a_turn(
    call: Callable[[], object], control: Communicator, device: torch.device, seconds: float
) -> int:
    control.barrier()
    estimate = max(max(times) for times in control.all_gather_object(timed(call, 1, device)))
    return max(1, min(MOST_CALLS, int(seconds / TURNS / max(estimate, 1e-7))))


def timed(call: Callable[[], object], num_calls: int, device: torch.device) -> list[float]:
    """Seconds of each of ``num_calls`` calls in a row, after one that is not timed where there
    are several.
    """
    if num_calls > 1:
        call()
    if is_gpu(device):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(num_calls):
            call()
        synchronize(device)
        return [(time.perf_counter() - began) / num_calls]
    seconds = []
    for _ in range(num_calls):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return seconds
