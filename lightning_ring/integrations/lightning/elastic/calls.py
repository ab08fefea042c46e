"""Collectives outside optimizer steps, made again in place when a rank dies in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_ring.comm.communicator import Communicator

T = TypeVar("T")
CallsOfRank = tuple[int, Any]  # how many have finished, and the last result


class HostCalls:
    """Counts this rank's calls, so that it can get a missed result from another rank.

    No rank returns from a call before all have come to it. After a death some may have finished a
    call in which the others still are. ``recover(error)`` brings this rank into the next view, in
    which `compare` is called, or raises.
    """

    def __init__(self, recover: Callable[[Exception], None]) -> None:
        self._recover = recover
        self._count = 0
        self._last: Any = None
        self._inside = False
        self._missed: tuple[Any] | None = None

    def call(
        self,
        run: Callable[[], T],
        again: Callable[[], None] = lambda: None,
        *,
        counted: bool = True,
    ) -> T:
        """``run()``, and once more for each rank that dies in it, after ``again()``.

        Without ``counted`` a rank may return before all have come to it.
        """
        if self._inside:
            return run()
        while True:
            try:
                with self.inside():
                    result = run()
            except Exception as error:
                self._recover(error)
                if counted and self._missed is not None:
                    result = self._missed[0]
                    break
                again()
            else:
                break
        if counted:
            self._count += 1
            self._last = result.clone() if isinstance(result, Tensor) else result
        return result

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Around code that is done again as a whole."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def of_rank(self) -> CallsOfRank:
        return self._count, self._last

    def compare(self, of_ranks: Sequence[CallsOfRank]) -> None:
        """Learn whether another rank has finished the call under way."""
        most, last = max(of_ranks, key=lambda calls: calls[0])
        assert most <= self._count + 1, (
            f"a rank is {most - self._count} calls ahead: it waited for nobody"
        )
        self._missed = (last,) if most > self._count else None


@contextmanager
def gathering_through(
    calls: HostCalls, connected: Callable[[], Communicator], module: nn.Module
) -> Iterator[None]:
    """Gather the states of each metric of ``module`` in one of ``calls``."""
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    for metric in metrics:
        vars(metric)["_sync_dist"] = _Gathering(metric, calls, connected)
    try:
        yield
    finally:
        for metric in metrics:
            vars(metric).pop("_sync_dist", None)


class _Gathering:
    """A metric's ``_sync_dist``, which sets its states only after it has gathered all of them."""

    def __init__(
        self, metric: Metric, calls: HostCalls, connected: Callable[[], Communicator]
    ) -> None:
        self._metric = metric
        self._calls = calls
        self._connected = connected

    def __call__(self, gather: Any = gather_all_tensors, process_group: Any = None) -> None:
        metric = self._metric
        if gather is gather_all_tensors and process_group is metric.process_group is None:
            # Waits in torch's Gloo group may not end when a rank dies.
            gather = self._gather

        def run() -> dict[str, Any]:
            type(metric)._sync_dist(metric, gather, process_group)
            return {name: getattr(metric, name) for name in metric._defaults}

        for name, state in self._calls.call(run).items():
            setattr(metric, name, state)

    def _gather(self, state: Tensor, group: None = None) -> list[Tensor]:
        comm = self._connected()
        gathered = comm.all_gather_object(state.detach().cpu(), name="state of a metric")
        of_ranks: list[Tensor] = [one.to(state.device) for one in gathered]
        of_ranks[comm.rank] = state
        return of_ranks
