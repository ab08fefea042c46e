"""The job watch: every rank learns within seconds that another one failed, died or left.

Every rank holds one TCP connection to a relay in rank 0. There are no heartbeats: the kernel closes
the connection of a dead process, and gives up on a lost host (`messages.LOST_SECONDS`). A rank that
is stuck in C code is alive. One daemon thread in each rank keeps the state.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from torch.distributed import Store

from lightning_ring.errors import PeerFailedError
from lightning_ring.job.exit import LauncherProbe, end_process, remove_files_of_mpirun, say
from lightning_ring.job.ranks import RankInfo
from lightning_ring.job.watch.messages import Message, MessageConnection, in_forked_children
from lightning_ring.job.watch.peers import PeerEvent, comes_from_a_peer
from lightning_ring.job.watch.relay import Relay, join_relay

FAILED_GRACE = 20.0  # seconds after another one failed, before the watch ends a rank
DEAD_GRACE = 10.0  # the same after one died
LOST_GRACE = 5.0  # the same after one was lost; a cut link takes 15 s to notice
# After another rank has left, in seconds: its last data may be on the way.
LEFT_GRACE = 5.0
CLOSE_SECONDS = 10.0  # for which rank 0 waits until the others have closed too


class JobWatch:
    """This rank's end of the job watch, whose ranks know ``secret``. Building one is collective."""

    def __init__(self, info: RankInfo, store: Store, secret: str) -> None:
        self.info = info
        # of other ranks: in rank 0 all, in other ranks the first ones
        self._failures: list[PeerEvent] = []
        self._left: dict[int, PeerEvent] = {}
        self._gone: set[int] = set()
        self._all_left = False  # this rank included
        self._news = threading.Condition()
        self._callbacks: list[Callable[[Message], None]] = []
        self._fit = 0
        self._reported = False
        # Messages of this rank, and how many of them came back.
        self._told, self._returned = 0, 0
        self._closed = False
        self._connection: MessageConnection | None
        self._relay: Relay | None = None
        self._open(store, secret)

    def check(self) -> None:
        """Raise `PeerFailedError` if another rank failed, died or left; for loops that wait.

        A rank that left normally counts only after `LEFT_GRACE` seconds: its data may be on the
        way.
        """
        if not self._failures and not self._left:
            return
        with self._news:
            before = time.monotonic() - LEFT_GRACE
            long_left = (event for event in self._left.values() if event.time <= before)
            event = self.failure() or next(long_left, None)
        if event is not None:
            raise self._error(event)

    def blame(self, error: BaseException, seconds: float = 3.0) -> None:
        """Raise `PeerFailedError` from ``error`` if another rank fails by itself within
        ``seconds``.

        For errors of transports, which do not know the rank or the reason.
        """
        self._wait_for(lambda: self._culprit() is not None, seconds)
        if (event := self._culprit()) is not None:
            raise self._error(event) from error

    def failure(self) -> PeerEvent | None:
        """The first failure of another rank in this fit, echoes last. A dead rank counts in every
        fit.
        """
        with self._news:
            current = [
                event for event in self._failures if event.kind == "dead" or event.fit == self._fit
            ]
        return min(current, key=lambda event: (event.echo, event.time), default=None)

    def report(self, exception: BaseException) -> None:
        """Tell all ranks that this one raised ``exception``; the watch then does not end it."""
        if not self._reported:
            self._reported = True
            text = f"{type(exception).__name__}: {str(exception).strip()}"[:2000]
            self.tell(
                {"kind": "failed", "text": text, "echo": comes_from_a_peer(exception)}, wait=1.0
            )

    def tell(self, event: Message, wait: float = 0.0) -> bool:
        """Send ``event`` (JSON, with a ``"kind"``) to the `on_event` callbacks of all ranks.

        With a rank under ``"to"``, to that one's only. ``wait`` up to so many seconds until rank 0
        has passed it on; returns whether it has.
        """
        with self._news:
            if self._closed or self._connection is None:
                return False
            self._told += 1
            number = self._told
            self._connection.send(event | {"fit": self._fit})
            self._wait_for(lambda: self._returned >= number, wait)
            return self._returned >= number

    def on_event(self, callback: Callable[[Message], None]) -> None:
        """Call ``callback`` in the watch's thread with every message: ``kind, rank, host, pid`` and
        the sender's fields. It has to be quick and raise nothing.
        """
        self._callbacks.append(callback)

    def peers(self) -> dict[int, Message]:
        """In rank 0: ``host`` and ``pid`` of the ranks that take part."""
        assert self._relay is not None
        return self._relay.hellos()

    def reset(self) -> None:
        """Start a new fit: earlier reports no longer count, deaths do."""
        with self._news:
            self._fit += 1
            self._reported = False
        self.tell({"kind": "fit", "to": self.info.rank})

    def leave(self) -> None:
        """Say goodbye at the end of the script, and stay until the others have left as well.

        MPI_Finalize could not be ended, and rank 0 holds the relay. If another rank fails
        meanwhile, this process ends with exit code 1, unless the script caught an error of this
        rank itself.
        """
        self.tell({"kind": "left"}, wait=1.0)
        stay = self.info.source == "mpi" or self.info.rank == 0
        while stay and not self._closed:
            with self._news:
                if self._all_left:
                    break
                failure = self.failure()
                caught = self._reported and failure is not None and failure.kind == "failed"
                if (failure is None or caught) and self._connection is not None:
                    self._news.wait(timeout=1.0)
                    continue
            if not self._reported:
                say(
                    f"{self.info.name} had finished, and ends with exit code 1: "
                    f"{failure or 'rank 0 has gone'}"
                )
            end_process(1)
        self.close()

    def leave_early(self) -> None:
        """Say goodbye before the script ends. Rank 0 waits up to `CLOSE_SECONDS` for others."""
        self.tell({"kind": "left"}, wait=1.0)
        if self.info.rank == 0 and not self._closed:
            self._wait_for(lambda: self._all_left, CLOSE_SECONDS)
        self.close()

    def free_launcher(self, failure: PeerEvent) -> None:
        """Let mpirun end as well, which waits for the host of the lost rank."""
        if failure.lost and self.info.local_rank == 0:
            self._launcher.end_soon()

    def wait_until_gone(self, rank: int, timeout: float) -> None:
        """Wait until ``rank``'s process has ended; it may be printing the error that matters."""
        self._wait_for(lambda: rank in self._gone, timeout)

    def close(self) -> None:
        """Stop watching. Not collective; calling it twice is fine."""
        if self._closed:
            return
        self._closed = True
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(timeout=2)
        if self._relay is not None:
            self._relay.door.close()

    def _wait_for(self, news: Callable[[], bool], seconds: float) -> None:
        with self._news:
            self._news.wait_for(lambda: news() or self._connection is None, seconds)

    def _error(self, event: PeerEvent) -> PeerFailedError:
        return PeerFailedError(f"{event}. Rank {self.info.rank} cannot go on without it.")

    def _culprit(self) -> PeerEvent | None:
        event = self.failure()
        return event if event is not None and not event.echo else None

    def _open(self, store: Store, secret: str) -> None:
        self._relay, self._connection, self.rank_0 = join_relay(self.info, store, secret)
        self._launcher = LauncherProbe()
        in_forked_children(self._forget)
        self._thread = threading.Thread(target=self._watch, name="ring-watch", daemon=True)
        self._thread.start()

    def _forget(self) -> None:
        """A forked child must not hold the connection open when its parent is killed."""
        self._closed = True
        self._news = threading.Condition()
        if self._connection is not None:
            self._connection.close()

    def _watch(self) -> None:
        connection = self._connection
        assert connection is not None
        while not self._closed:
            if self._connection is None:
                time.sleep(0.5)
            else:
                connection.wait(0.5)
                over = self._receive(connection)
                if over is not None and not self._closed:
                    self._lose_relay(over)
            self._end_if_overdue()
        connection.close()

    def _receive(self, connection: MessageConnection) -> str | None:
        with self._news:
            messages, over = connection.receive()
            connection.flush()
            for message in messages:
                if message["rank"] == self.info.rank:
                    self._returned += 1
                else:
                    self._note(message)
            self._news.notify_all()
        for message in messages:
            for callback in self._callbacks:
                callback(message)
        return over

    def _note(self, message: Message) -> None:
        kind, rank = message["kind"], message["rank"]
        self._all_left = self._all_left or kind == "all left"
        if kind in ("dead", "gone"):
            self._gone.add(rank)
        if kind in ("failed", "dead", "left"):
            event = PeerEvent(
                **{name: message[name] for name in PeerEvent.__slots__ if name in message}
            )
            if kind == "left":
                self._left[rank] = event
            else:
                self._failures.append(event)

    def _lose_relay(self, why: str) -> None:
        with self._news:
            known = {event.rank for event in self._failures} | self._left.keys()
            if 0 not in known:
                self._note(self.rank_0 | {"kind": "dead", "rank": 0, "text": why})
            self._gone.add(0)
            self._connection = None
            self._news.notify_all()

    def _end_if_overdue(self) -> None:
        """This rank may be in a C++ collective that nothing can interrupt."""
        gone = self._launcher.gone()
        if gone is not None:
            say(f"{self.info.name} ends: {gone}")
            remove_files_of_mpirun()
            end_process(1)
        failure = self.failure()
        if failure is not None and not self._reported:
            grace = DEAD_GRACE if failure.kind == "dead" else FAILED_GRACE
            grace = LOST_GRACE if failure.lost else grace
            if time.monotonic() - failure.time > grace:
                say(f"{self.info.name} ends, {grace:.0f} s after it was told: {failure}")
                self.free_launcher(failure)
                end_process(1)
