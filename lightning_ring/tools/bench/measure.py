"""Times collectives: all backends take turns at one size, and every result is checked against
known sums.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ring.comm.communicator import Communicator, shard
from lightning_ring.errors import CollectiveError
from lightning_ring.host.accelerator import gpu_module, is_gpu
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
        halves = 2 if self.collective == "all_reduce" else 1
        return self.algorithm_bandwidth * halves * (world_size - 1) / world_size


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
    for size in sizes:
        numel = max(1, size // (4 * control.world_size)) * control.world_size
        total = repeated(
            torch.stack([_block(rank) for rank in range(control.world_size)]).sum(0), numel, device
        )
        target = total.clone()
        entries = [
            _Entry(
                name, contender, collective, contender.empty(numel, torch.float32, device), total
            )
            for name, contender in contenders.items()
        ]
        calls: dict[str, Callable[[], object]] = {COPY: functools.partial(target.copy_, total)}
        calls |= {each.name: each.call for each in entries}
        for each in entries:
            each.verify(control)
        times: dict[str, list[float]] = {name: [] for name in calls}
        batches = {
            name: _calls_a_turn(call, control, device, seconds) for name, call in calls.items()
        }
        order = list(calls)
        for turn in range(TURNS):
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                control.barrier()
                times[name] += timed(calls[name], batches[name], device)
        for each in entries:
            each.verify(control)
        slowest = slowest_rank(times, control)
        yield [
            summary(collective, name, total.nbytes, longest) for name, longest in slowest.items()
        ]


class _Entry:
    """One backend's collective on its own memory."""

    def __init__(
        self, name: str, contender: Collectives, collective: str, flat: Tensor, total: Tensor
    ) -> None:
        self.name = name
        self._contender = contender
        self._collective = collective
        self._flat = flat
        self._total = total
        self._run = getattr(contender, f"{collective}_")

    def call(self) -> None:
        self._run(self._flat).wait()

    def verify(self, control: Communicator) -> None:
        """Run it on numbers whose sums float32 holds exactly. Leaves zeros, which stay zeros
        however often summed.
        """
        world_size, own = control.world_size, self._contender.shard_index
        if self._collective == "all_gather":
            self._flat.fill_(-1)
            shard(self._flat, world_size, own).copy_(shard(self._total, world_size, own))
        else:
            self._flat.copy_(repeated(_block(control.rank), self._flat.numel(), self._flat.device))
        control.barrier()
        self.call()
        found, expected = self._flat, self._total
        if self._collective == "reduce_scatter":
            found, expected = shard(found, world_size, own), shard(expected, world_size, own)
        wrong = int((found != expected).sum())
        if wrong:
            raise CollectiveError(
                f"{self.name}: {self._collective} of {self._flat.numel()} float32 left {wrong} of "
                f"{found.numel()} elements wrong on rank {control.rank}. Its times mean nothing; "
                "please report this."
            )
        self._flat.zero_()


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
        synchronize = gpu_module(device).synchronize
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


def slowest_rank(times: dict[str, list[float]], control: Communicator) -> dict[str, list[float]]:
    """For each call the longest of all ranks' times."""
    by_rank = control.all_gather_object(times)
    return {
        name: [max(call) for call in zip(*(rank[name] for rank in by_rank), strict=True)]
        for name in times
    }


def summary(collective: str, backend: str, num_bytes: int, seconds: list[float]) -> Timing:
    ordered = sorted(seconds)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return Timing(
        collective, backend, num_bytes, statistics.median(ordered), ordered[0], p95, len(ordered)
    )
