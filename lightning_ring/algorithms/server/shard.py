"""What one server holds, and when it steps: pushes of gradients come in from several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ring.algorithms.server.twin import Settings, Twin
from lightning_ring.comm.waiting import CHECK_SECONDS, ranks_text
from lightning_ring.errors import CollectiveError


class Push(NamedTuple):
    """What a worker sends: a gradient for each piece (1-D; `None` where there is none), in
    memory of the caller's.
    """

    gradients: Sequence[Tensor | None]
    settings: Settings
    asks_to_stop: bool = False


class ServerShard:
    """The pieces of one server; `push` gives a worker's gradients to its optimizer, and returns
    when it may go on.

    Args:
        num_workers: Each has a number from 0.
        staleness: `None`: of each worker's push a step at once. A number s: and the worker goes on
            when no other one is more than s pushes behind it.
        bulk: Instead a step of the average, when all workers have pushed.
        compensation: λ of Zheng et al. (`ParameterServer`).
        check: Called while a push waits; what it raises ends the wait.
    """

    def __init__(
        self,
        twin: Twin,
        num_workers: int,
        *,
        bulk: bool = False,
        staleness: int | None = None,
        compensation: float | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self.twin = twin
        self.num_updates = 0
        self.told_to_stop = False  # some worker has asked for it
        self._num_workers = num_workers
        self._bulk = bulk
        self._staleness = staleness
        self._compensation = compensation
        self._check = check
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._round: dict[int, Push] = {}
        self._idle: set[int] = set()
        self._clocks = [0] * num_workers  # pushes of each since they last met
        self._pulled = [0] * num_workers  # `num_updates` when each last saw the weights
        self._seen: list[list[Tensor]] = []  # by worker, the weights that it saw then
        if compensation is not None:
            self._seen = [self.weights() for _ in range(num_workers)]

    def weights(self) -> list[Tensor]:
        """A copy of each piece, 1-D."""
        with self._changed:
            return [weight.detach().reshape(-1).clone() for weight in self.twin.weights]

    def push(self, worker: int, push: Push, pulled: Sequence[Tensor]) -> int:
        """Step, and copy the weights from which ``worker`` goes on into ``pulled``.

        Returns how many updates by others came between the weights that the worker has seen and its
        own.
        """
        with self._changed:
            self._raise_failure()
            self._idle.discard(worker)
            delay = self.num_updates - self._pulled[worker]
            try:
                if self._bulk:
                    self._round[worker] = push
                    self._finish_round_or_wait()
                else:
                    self.told_to_stop |= push.asks_to_stop
                    self._step(self._compensated(worker, push.gradients), push.settings)
                    self._clocks[worker] += 1
                    self._changed.notify_all()
                    self._wait_until(lambda: self._may_go_on(worker))
            except Exception as error:
                self._fail(error)
                raise
            self._look(worker, pulled)
            return delay

    def rest(self, worker: int) -> None:
        """``worker`` pushes nothing for a while: nobody waits for it until it pushes again."""
        with self._changed:
            self._raise_failure()
            self._idle.add(worker)
            self._changed.notify_all()

    def wait_for_workers(self) -> None:
        """Return when all workers rest."""
        with self._changed:
            self._wait_until(lambda: len(self._idle) == self._num_workers)

    def meet(self) -> None:
        """All workers rest, and go on from the weights as they are now."""
        with self._changed:
            self._idle.clear()
            self._clocks = [0] * self._num_workers
            self._pulled = [self.num_updates] * self._num_workers
            if self._seen:
                self._seen = [self.weights() for _ in range(self._num_workers)]

    # -- holding the lock

    def _finish_round_or_wait(self) -> None:
        if len(self._round) < self._num_workers:
            number = self.num_updates
            self._wait_until(lambda: self._round_is_over(number))
            return
        pushes = [self._round[worker] for worker in range(self._num_workers)]
        self._round = {}
        self.told_to_stop = any(push.asks_to_stop for push in pushes)
        averages = [
            _average(gradients)
            for gradients in zip(*(push.gradients for push in pushes), strict=True)
        ]
        self._step(averages, pushes[0].settings)
        self._changed.notify_all()

    def _round_is_over(self, number: int) -> bool:
        if self.num_updates > number:
            return True
        if self._idle:
            raise CollectiveError(
                f"{ranks_text([*self._round])} took a step, while {ranks_text([*self._idle])} had "
                "ended its epoch, or evaluates. With mode='bulk' all ranks take the same steps: "
                "give every rank the same number of batches, or use mode='async'."
            )
        return False

    def _may_go_on(self, worker: int) -> bool:
        if self._staleness is None:
            return True
        slowest = min(
            (clock for other, clock in enumerate(self._clocks) if other not in self._idle),
            default=0,
        )
        return self._clocks[worker] - slowest <= self._staleness

    def _wait_until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self._changed.wait(CHECK_SECONDS)
            self._raise_failure()
            self._check()

    @torch.no_grad()
    def _step(self, gradients: Sequence[Tensor | None], settings: Settings) -> None:
        self.twin.use(settings)
        self.twin.step(gradients)
        self.num_updates += 1

    @torch.no_grad()
    def _compensated(
        self, worker: int, gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """g + λ g ⊙ g ⊙ (w - the weights for which g was computed)."""
        if self._compensation is None:
            return gradients
        weights = (weight.detach().view(-1) for weight in self.twin.weights)
        return [
            None if g is None else g.addcmul(g * g, weight - seen, value=self._compensation)
            for g, weight, seen in zip(gradients, weights, self._seen[worker], strict=True)
        ]

    @torch.no_grad()
    def _look(self, worker: int, pulled: Sequence[Tensor]) -> None:
        weights = [weight.detach().view(-1) for weight in self.twin.weights]
        self._pulled[worker] = self.num_updates
        for targets in (pulled, self._seen[worker]) if self._seen else (pulled,):
            if weights:
                torch._foreach_copy_([*targets], weights)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _average(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Summed in the order of the workers, 16 bits as float32; `None` if no worker has one."""
    given = [gradient for gradient in gradients if gradient is not None]
    if not given:
        return None
    dtype = given[0].dtype
    total = given[0].to(
        torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype, copy=True
    )
    for gradient in given[1:]:
        total += gradient
    return (total / len(gradients)).to(dtype)
