"""How one buffer travels uncompressed."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_ring.comm.communicator import Communicator, ReduceOp, Work


def average_(flat: Tensor, comm: Communicator, active_ranks: int | None, name: str) -> Work:
    """Start to average ``flat`` in place over all ranks; or its sum is divided by ``active_ranks`` of them."""
    if active_ranks is None:
        return comm.all_reduce_(flat, op=ReduceOp.AVG, name=name)
    return ChainedWork(comm.all_reduce_(flat, op=ReduceOp.SUM, name=name), lambda: flat.div_(active_ranks))


class ChainedWork:
    """A `Work` with something left to do once it is over: ``then`` runs once, in the thread that waits first."""

    __slots__ = ("_then", "_work")

    def __init__(self, work: Work, then: Callable[[], object]) -> None:
        self._work = work
        self._then: Callable[[], object] | None = then

    def wait(self) -> None:
        self._work.wait()
        if self._then is not None:
            then, self._then = self._then, None
            then()

    def done(self) -> bool:
        return self._work.done()
