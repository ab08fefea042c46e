"""The job watch: every rank learns within seconds that another one failed, was killed, or left.

Every rank holds one TCP connection to a relay in rank 0. There are no heartbeats: the kernel closes the connection of
a process that dies, and gives up on one whose host does not answer (`lines.LOST_SECONDS`); a rank that is stuck in C
code, holding the GIL for minutes, is alive. The state is kept by one daemon thread in each rank.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
import weakref
from collections.abc import Callable, Iterator

from torch.distributed import Store

from lightning_ring.errors import PeerFailedError
from lightning_ring.job.exit import LauncherProbe, end_process, remove_what_mpirun_left, say
from lightning_ring.job.ranks import RankInfo
from lightning_ring.job.watch.messages import LineConnection, Message
from lightning_ring.job.watch.peers import PeerEvent, PeerLedger, comes_from_a_peer
from lightning_ring.job.watch.relay import Relay, host_of, join_relay

FAILED_GRACE = 20.0  # seconds a rank may go on after another one failed, before the watch ends it
DEAD_GRACE = 10.0  # the same after one died
LOST_GRACE = 5.0  # the same after one was lost, as noticing a cut link takes up to 15 s by itself
LEFT_GRACE = 5.0  # seconds that a wait goes on although another rank has left: its last data may be on the way


class JobWatch:
    """This rank's end of the job watch. Building one is collective; with one rank it opens nothing.

    Raises:
        RankDiscoveryError: The relay of rank 0 could not be reached.
    """

    def __init__(self, info: RankInfo, store: Store) -> None:
        self.info = info
        self._ledger = PeerLedger()
        self._news = threading.Condition()
        self._callbacks: list[Callable[[Message], None]] = []
        self._fit = 0
        self._reported = False
        self._told, self._returned = 0, 0  # messages of this rank, and how many of them the relay has passed on
        self._blocked: tuple[str, float] | None = None
        self._connection: LineConnection | None = None
        self._relay: Relay | None = None
        self._closed = info.world_size == 1
        if not self._closed:
            self._open(store)

    def check(self, waited: float | None = None) -> None:
        """Raise if another rank failed, died or left; for loops that wait for other ranks. Costs nothing otherwise.

        ``waited`` is how many seconds the caller has waited so far. A rank that left normally may have sent, before,
        all that the caller still waits for, so it counts only after `LEFT_GRACE` seconds.

        Raises:
            PeerFailedError: Names the rank, its host and its error.
        """
        if not self._ledger.events and not self._ledger.left:
            return
        with self._news:
            event = self._ledger.failure(self._fit) or self._long_left(waited)
        if event is not None:
            raise PeerFailedError(f"{event}. Rank {self.info.rank} cannot go on without it.")

    def blame(self, error: BaseException, seconds: float = 3.0) -> None:
        """Raise `PeerFailedError` from ``error`` if another rank failed by itself, or does within ``seconds``.

        For errors of transports ("connection closed by peer"), which know that somebody has gone but not who or why.
        """
        with self._news:
            found = self._news.wait_for(
                lambda: ((event := self._ledger.failure(self._fit)) and not event.echo) or self._connection is None,
                timeout=seconds,
            )
            event = self._ledger.failure(self._fit)
        if found and event is not None:
            raise PeerFailedError(f"{event}. Rank {self.info.rank} cannot go on without it.") from error

    def failure(self) -> PeerEvent | None:
        """The failure or death of another rank to blame, if any."""
        with self._news:
            return self._ledger.failure(self._fit)

    def report(self, exception: BaseException) -> None:
        """Tell all ranks that this one raised ``exception``; a rank that has told is not ended by the watch."""
        if not self._reported:
            self._reported = True
            text = f"{type(exception).__name__}: {str(exception).strip()}"[:2000]
            self.tell({"kind": "failed", "text": text, "echo": comes_from_a_peer(exception)}, wait=1.0)

    def tell(self, event: Message, wait: float = 0.0) -> bool:
        """Send ``event`` (JSON, with a ``"kind"``) to the `on_event` callbacks of all ranks, this one's included.

        With a rank under ``"to"``, to that one's and this one's only. With ``wait``, return once rank 0 has passed it
        on, at most after so many seconds; returns whether it has.
        """
        with self._news:
            if self._closed or self._connection is None:
                return False
            self._told += 1
            number = self._told
            self._connection.send(event | {"fit": self._fit})
            if wait:
                self._news.wait_for(lambda: self._returned >= number or self._connection is None, timeout=wait)
            return self._returned >= number

    def on_event(self, callback: Callable[[Message], None]) -> None:
        """Call ``callback`` with every message of any rank: ``kind, rank, host, pid`` and what was told.

        In the watch's thread: be quick and raise nothing.
        """
        self._callbacks.append(callback)

    def address(self) -> str:
        """Under which other ranks can reach this host: that of the connection to rank 0."""
        assert self._connection is not None
        address = str(self._connection.socket.getsockname()[0])
        return self._host_of_rank_0 if address.startswith("127.") else address

    def peers(self) -> dict[int, Message]:
        """In rank 0: ``host`` and ``pid`` of the ranks that take part, without those that have left or died."""
        with self._news:
            over = self._ledger.left.keys() | self._ledger.gone
        hellos = self._relay.hellos() if self._relay is not None else {}
        return {rank: hello for rank, hello in hellos.items() if rank not in over}

    @contextlib.contextmanager
    def blocking(self, what: str) -> Iterator[None]:
        """Mark a wait for other ranks that cannot call `check`: the watch ends the process if one of them left."""
        self._blocked = (what, time.monotonic())
        try:
            yield
        finally:
            self._blocked = None

    def reset(self) -> None:
        """Start a new fit: what was reported in the one before no longer counts. The dead stay dead."""
        with self._news:
            self._fit += 1
            self._reported = False
        self.tell({"kind": "fit"})

    def leave(self) -> None:
        """Say goodbye at the end of the script, and stay until the others have left as well.

        Under MPI the process would otherwise stay in MPI_Finalize, where nothing could end it; and rank 0 holds the
        relay. If another rank fails meanwhile, this process ends with exit code 1; not if the script caught what this
        rank raised itself and went on to its normal end, as it may have done on all ranks.
        """
        self.tell({"kind": "left"}, wait=1.0)
        stay = self.info.source == "mpi" or self.info.rank == 0
        while stay and not self._closed:
            with self._news:
                if len(self._ledger.left.keys() | self._ledger.gone) >= self.info.world_size - 1:
                    break
                failure = self._ledger.failure(self._fit)
                caught = self._reported and failure is not None and failure.kind == "failed"
                if (failure is None or caught) and self._connection is not None:
                    self._news.wait(timeout=1.0)
                    continue
            if not self._reported:
                say(f"rank {self.info.rank} had finished, and ends with exit code 1: {failure or 'rank 0 has gone'}")
            end_process(1)
        self.close()

    def free_launcher(self, failure: PeerEvent) -> None:
        """Before this rank ends because another host was lost: let mpirun end as well, which waits for that host."""
        if failure.lost and self.info.local_rank == 0:
            self._launcher.end_soon()

    def wait_until_gone(self, rank: int, timeout: float) -> None:
        """Wait until ``rank``'s process has ended; it may be printing the error that matters."""
        with self._news:
            self._news.wait_for(lambda: rank in self._ledger.gone or self._connection is None, timeout=timeout)

    def close(self) -> None:
        """Stop watching. Not collective; calling it twice is fine."""
        if self._closed:
            return
        self._closed = True
        os.write(self._wake[1], b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2)
        if self._relay is not None:
            self._relay.close()

    def _open(self, store: Store) -> None:
        self._relay, self._connection, self.rank_0 = join_relay(self.info, store)
        self._host_of_rank_0 = host_of(store)
        self._wake = os.pipe()
        self._launcher = LauncherProbe()
        forget = weakref.WeakMethod(self._forget)
        os.register_at_fork(after_in_child=lambda: (method := forget()) and method())
        self._thread = threading.Thread(target=self._watch, name="ring-watch", daemon=True)
        self._thread.start()

    def _forget(self) -> None:
        """A forked child (a data-loader worker) must not hold the connection open when its parent is killed."""
        self._closed = True
        self._news = threading.Condition()
        if self._connection is not None:
            self._connection.close()

    def _watch(self) -> None:
        connection = self._connection
        assert connection is not None
        selector = selectors.DefaultSelector()
        selector.register(connection.socket, selectors.EVENT_READ)
        selector.register(self._wake[0], selectors.EVENT_READ)
        while not self._closed:
            selector.select(timeout=0.5)
            if self._connection is not None and (over := self._receive(connection)) is not None:
                selector.unregister(connection.socket)
                self._lose_relay(over)
            self._end_if_overdue()  # also without a relay: the launcher and the grace still have to be watched
        connection.close()
        selector.close()

    def _receive(self, connection: LineConnection) -> str | None:
        with self._news:
            messages, over = connection.receive()
            connection.flush()
            for message in messages:
                if message["rank"] == self.info.rank:
                    self._returned += 1
                else:
                    self._ledger.take(message, self._fit)
            self._news.notify_all()
        for message in messages:
            for callback in self._callbacks:
                callback(message)
        return over

    def _lose_relay(self, why: str) -> None:
        with self._news:
            if 0 not in self._ledger.left and not any(event.rank == 0 for event in self._ledger.events):
                self._ledger.take({"kind": "dead", "rank": 0, "why": why} | self.rank_0, self._fit)
            self._ledger.gone.add(0)
            self._connection = None
            self._news.notify_all()

    def _long_left(self, waited: float | None) -> PeerEvent | None:
        left = self._ledger.first_left()
        if left is None or time.monotonic() - left.time < LEFT_GRACE or (waited is not None and waited < LEFT_GRACE):
            return None
        return left

    def _end_if_overdue(self) -> None:
        """The last resort: this rank may be in a C++ collective that nothing can interrupt."""
        me, now = f"rank {self.info.rank}", time.monotonic()
        gone = self._launcher.gone()
        if gone is not None:
            say(f"{me} ends: {gone}")
            remove_what_mpirun_left()
            end_process(1)
        with self._news:
            failure, left, blocked = self._ledger.failure(self._fit), self._ledger.first_left(), self._blocked
        if failure is not None and not self._reported:
            grace = LOST_GRACE if failure.lost else DEAD_GRACE if failure.kind == "dead" else FAILED_GRACE
            if now - failure.time > grace:
                say(f"{me} ends, {grace:.0f} s after it was told: {failure}")
                self.free_launcher(failure)
                end_process(1)
        if left is not None and blocked is not None and now - max(left.time, blocked[1]) > DEAD_GRACE:
            say(f"{me} ends, waiting in {blocked[0]}: {left}")
            end_process(1)
