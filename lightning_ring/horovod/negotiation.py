"""Ranks may submit named collectives in different orders: here they agree on one order.

A *cycle* tells the others what this rank has submitted. A mask has one byte for each collective
that all ranks have run before (`Pending`), and the minimum over the ranks leaves those that all
have submitted: a steady step costs this one short message. Names that are new to some rank travel
as objects, in a second message.

A rank takes part in cycles while it has an unfinished request. A waiting thread runs the cycles
itself, which saves a change of threads; otherwise a thread of this module does.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import compress, count
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from lightning_ring.comm.collective_queue import Alarm
from lightning_ring.comm.communicator import Communicator, ReduceOp
from lightning_ring.comm.waiting import WaitPolicy, ranks_text
from lightning_ring.errors import HorovodInternalError, RingError
from lightning_ring.horovod.execution import Agreed, Planner, RoundPlan
from lightning_ring.horovod.pending import ALL_LEAVE, HEAD, NO_NEWS, STAYS, Pending
from lightning_ring.horovod.requests import GRADIENTS, JOIN, Meta, Submission, problem_of
from lightning_ring.timeline.clocks import ClockReading
from lightning_ring.timeline.session import Session
from lightning_ring.timeline.settings import GENERATOR

# delay of the thread after a submission; and the longest pause between idle cycles
CYCLE_SECONDS = 0.001
SHORTEST_PAUSE = 50e-6
STALL_SECONDS = 60.0
_SHUTDOWN = (
    "the Horovod API was shut down on {}, or the script has ended there, while other ranks need "
    "it for a collective or for gradients. All ranks make the same calls; a rank that has fewer "
    "batches calls hvd.join() after its last one."
)
_MOST_PLANS = 64
_AGAIN = ", without a step since the last time"

log = logging.getLogger("lightning_ring")


class Negotiation:
    """Of the ranks of one process set, over its ``comm``. ``ranks`` are their numbers in the job.

    Buckets of gradients do not wait for it. A rank announces each reduction by a request: ranks
    that have joined then take part, and if a rank has left, the wait for the buckets fails.
    """

    def __init__(self, comm: Communicator, ranks: list[int], policy: WaitPolicy) -> None:
        self.comm = comm
        self.ranks = ranks
        self.policies = [policy]  # of the communicators that carry gradients
        self.num_optimizers = 0
        # by announcement, the reducer of one optimizer
        self.gradients: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self._announced: Submission | None = None
        self._owed: deque[str] = deque()  # announcements of other ranks since this one joined
        self.timeline: Timeline | None = None
        self.unnamed: defaultdict[str, count[int]] = defaultdict(count)
        self._pending = Pending(comm.rank)
        self._leaving = False
        self.ended: str | None = None
        self._cause: BaseException | None = None
        # -- of the cycles, whose lock is held by the thread that runs one
        self._moving = threading.Lock()
        self._table: dict[str, dict[int, Meta]] = {}  # told by some rank, in the order of arrival
        self._since: dict[str, float] = {}
        self._joined: dict[int, None] = {}  # in the order of joining
        self._planner = Planner(comm)
        self._plans: dict[bytes, RoundPlan] = {}
        self._pause = SHORTEST_PAUSE
        self._next_cycle = 0.0
        # -- of the thread
        self._waiters: deque[None] = deque()  # appending and popping are atomic, counting is not
        self._alarm = Alarm(CYCLE_SECONDS)
        self._alarm_is_set = False
        self._closed = False
        self._thread = threading.Thread(target=self._run_behind, name="ring-horovod", daemon=True)
        self._thread.start()

    def submit(self, request: Submission) -> None:
        """Have ``request`` run once every rank has submitted it.

        Raises:
            ValueError: A request of that name is not done yet.
            HorovodInternalError: The job is over.
        """
        if self.ended is not None or self._leaving:
            raise HorovodInternalError(self.ended or _SHUTDOWN.format("this rank")) from self._cause
        self._pending.add(request)
        if self.ended is not None:  # meanwhile
            self._end(self.ended, self._cause)
        if not self._alarm_is_set:
            self._wake_thread()

    def meet(self, name: str, op: str = "", *, kind: str = "meeting") -> None:
        """Return when every rank is here. Fails if one has left or (except for a barrier)
        joined."""
        request = Submission(name, Meta(kind, op=op))
        self.submit(request)
        self.wait(request)
        request.outcome()

    def announce(self, name: str, *, again: bool) -> None:
        """Announce that this rank reduces the gradients of ``name``, ``again`` without a step in
        between."""
        if self._announced is not None and not self._announced.done:
            self.wait(self._announced)  # ranks that have joined take part in one order
        request = Submission(name + _AGAIN * again, Meta(GRADIENTS))
        request.on_error = lambda error: [policy.fail(error) for policy in self.policies]
        self.submit(request)
        self._announced = request

    def join(self) -> int:
        """Take part with zeros until all ranks are here; returns the last one."""
        request = Submission(JOIN, Meta(JOIN))
        self.submit(request)
        while True:
            self.wait(request, or_owed=True)
            if not self._owed:
                break
            # in this thread, while others run cycles
            name = self._owed.popleft()
            gradients = self.gradients.get(name.removesuffix(_AGAIN))
            if gradients is None:
                raise HorovodInternalError(
                    f"other ranks reduce the {name}, which rank {self.ranks[self.comm.rank]} does "
                    "not have, and has called join(). All ranks make the same optimizers, in one "
                    "order."
                )
            gradients.send_zeros(again=name.endswith(_AGAIN))
        last: int = request.outcome()
        self.unnamed.clear()  # ranks that joined early have made fewer calls without a name
        return last

    def wait(self, request: Submission, *, or_owed: bool = False) -> None:
        """Run cycles until ``request`` is done or, with ``or_owed``, gradients are owed."""
        self._waiters.append(None)
        try:
            while not (request.done or (or_owed and self._owed)):
                self._rest()
                with self._moving:
                    # a cycle too many would deadlock: ranks may wait for this thread's buckets
                    if not (request.done or (or_owed and self._owed)):
                        self._cycle()
        finally:
            self._waiters.pop()
            if self._pending.requests:
                self._wake_thread()

    def leave(self) -> None:
        """Tell the others that this rank submits no more, without waiting for them."""
        self._leaving = self._pending.fresh = True
        self._wake_thread()

    def close(self) -> None:
        """End on all ranks. Collective: a rank that has more to do gets an error there."""
        self.leave()
        self._waiters.append(None)
        while self.ended is None:
            with self._moving:
                self._cycle()
        self._closed = True
        self._alarm.ring()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if self._cause is None:
            self.comm.close()
        else:
            self.comm.abandon()

    def _wake_thread(self) -> None:
        self._alarm_is_set = True
        self._alarm.set()

    def _run_behind(self) -> None:
        """Run cycles while nobody waits."""
        while not self._closed:
            self._alarm.wait()
            # before it looks: what is submitted from now on sets it again
            self._alarm_is_set = False
            while (
                (self._pending.requests or self._leaving)
                and not self._waiters
                and self.ended is None
            ):
                self._rest()
                with self._moving:
                    self._cycle()

    def _rest(self) -> None:
        pause = self._next_cycle - time.monotonic()
        if pause > 0 and not self._pending.fresh:
            time.sleep(pause)

    # -- a cycle, under `_moving`

    def _cycle(self) -> None:
        if self.ended is not None or not (self._pending.requests or self._leaving):
            return
        try:
            # modes and transforms of the waiting code take no part in this
            with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
                self._exchange()
        except BaseException as error:
            why, interrupted = f"{type(error).__name__}: {error}", not isinstance(error, Exception)
            if interrupted:
                why = "the script was interrupted inside a collective."
            self._end(why, error)
            if not isinstance(error, RingError) and self.comm.world_size > 1:
                # an error of this rank alone: the others fail when they need it
                ending = torch.zeros(1, dtype=torch.uint8)
                with suppress(RingError):
                    self.comm.all_reduce_(ending, name="the end, after an error of some rank")
            if interrupted:
                raise

    def _exchange(self) -> None:
        leaves = self._leaving
        sent, told = self._pending.tell(leaving=leaves)
        if self.comm.rank in self._joined:
            sent[HEAD:] = b"\1" * (len(sent) - HEAD)
        if self.timeline is not None:
            self.timeline.cycle()
        if self.comm.world_size > 1:
            mask = torch.frombuffer(sent, dtype=torch.uint8)
            name = "names that all ranks have submitted"
            self.comm.all_reduce_(mask, op=ReduceOp.MIN, name=name).wait()
        if not sent[STAYS]:
            left = self.comm.all_gather_object(leaves)
            leaving = [rank for rank, leaves in zip(self.ranks, left, strict=True) if leaves]
            self._end(_SHUTDOWN.format(ranks_text(leaving)))
            return
        common = bytes(sent[HEAD:])
        some_is_here = len(self._joined) < self.comm.world_size
        if ran := some_is_here and 1 in common:
            self._run_numbered(common)
        if heard := not sent[NO_NEWS]:
            self._hear(told)
        if self._table or self._joined:
            ran = self._run_named() or ran
        if ran or heard:
            self._pause, self._next_cycle = SHORTEST_PAUSE, 0.0
        elif sent[ALL_LEAVE]:
            self._end(_SHUTDOWN.format("all ranks"))  # nobody will submit what is missing
        else:
            self._look_for_stalls()
            self._next_cycle = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, CYCLE_SECONDS)

    def _run_numbered(self, common: bytes) -> None:
        """Run what the mask tells, planned once."""
        plan = None if self._joined else self._plans.get(common)
        if plan is None:
            plan = self._plan(dict(map(self._pending.agreed, compress(count(), common))))
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            if not self._joined:
                self._plans[common] = plan
        self._run(plan)

    def _hear(self, news: Sequence[Submission]) -> None:
        """Exchange names that are new to some rank, or have another tensor than before."""
        now = time.monotonic()
        mine = [(request.name, request.meta, now - request.since) for request in news]
        told: list[list[tuple[str, Meta, float]]] = self.comm.all_gather_object(
            mine, name="negotiation"
        )
        for rank, entries in enumerate(told):
            for name, meta, age in entries:
                if meta.kind == JOIN:
                    self._joined[rank] = None
                    continue
                if known := self._pending.known.get(name):
                    self._plans.clear()
                    self._pending.forget(name, changed=known.metas[rank] != meta)
                self._table.setdefault(name, {})[rank] = meta
                self._since[name] = min(self._since.get(name, now), now - age)

    def _run_named(self) -> bool:
        ready = {
            name: metas
            for name, metas in self._table.items()
            if len(metas.keys() | self._joined.keys()) == self.comm.world_size
        }
        for name in ready:
            del self._table[name], self._since[name]
        plan = self._plan(ready)
        for name, metas in plan.agreed.items():
            if len(metas) == self.comm.world_size:
                self._pending.number(name, metas)
        self._run(plan)
        if len(self._joined) < self.comm.world_size or self._table:
            return bool(ready)
        last = next(reversed(self._joined))
        self._joined = {}
        self._pending.requests[JOIN].result = self.ranks[last]
        self._pending.finish([JOIN])
        return True

    def _plan(self, ready: Agreed) -> RoundPlan:
        """Plan what fits together. The rest fails."""
        good, joined = {}, list(self._joined)
        for name, metas in ready.items():
            if problem := problem_of(name, metas, joined, self.ranks):
                self._pending.finish([name], problem)
            else:
                good[name] = metas
        return self._planner.plan(good)

    def _run(self, plan: RoundPlan) -> None:
        requests = self._pending.requests
        for names, run in plan.steps:
            began = time.monotonic()
            run(requests)
            if self.timeline is not None:
                for name in names & requests.keys():
                    request = requests[name]
                    self.timeline.ran(name, request.meta.kind, request.since, began)
        if self.comm.rank in self._joined:
            for name in plan.agreed:
                if name.startswith(GRADIENTS) and name not in requests:
                    self._owed.append(name)
        self._pending.finish(plan.agreed)

    def _end(self, why: str, cause: BaseException | None = None) -> None:
        self.ended, self._cause = why, cause
        self._pending.finish([*self._pending.requests], why, cause)

    def _look_for_stalls(self) -> None:
        now = time.monotonic()
        self._pending.tell_old_ones_by_name(now - STALL_SECONDS)
        late = [name for name, since in self._since.items() if now - since > STALL_SECONDS]
        for name in late:
            self._since[name] = now
            if self.comm.rank == 0:
                here = self._table[name]
                missing = [one for rank, one in enumerate(self.ranks) if rank not in here]
                log.warning(
                    "%s was not submitted by %s for %.0f s, while others wait for it.",
                    name,
                    ranks_text(missing),
                    STALL_SECONDS,
                )


class Timeline:
    """A Chrome trace of one process set, from now until `write`.

    Each name is a row: the wait for all ranks, then the run.
    """

    def __init__(self, path: Path, *, mark_cycles: bool) -> None:
        self._mark_cycles = mark_cycles
        began, zero = datetime.datetime.now(datetime.timezone.utc), time.monotonic()
        run = {"generator": GENERATOR, "run": uuid.uuid4().hex[:12], "began": began.isoformat()}
        clock = ClockReading(0.0, 0.0, zero, shared=True)
        self._session = Session(path, run | {"world_size": 1}, 0, zero, clock, None)
        epoch = {"start_time_since_epoch_in_micros": int(began.timestamp() * 1e6)}
        self._session.recorder.slice("cycles", "START", zero, zero, epoch)
        self.write = self._session.finish

    def cycle(self) -> None:
        if self._mark_cycles:
            now = time.monotonic()
            self._session.recorder.slice("cycles", "CYCLE_START", now, now)

    def ran(self, name: str, kind: str, submitted: float, began: float) -> None:
        what, slice_ = kind.upper(), self._session.recorder.slice
        slice_(name, f"NEGOTIATE_{what}", submitted, began)
        slice_(name, what, began, time.monotonic())
