"""A rank's side of catch-ups: sends its state to newcomers, from a thread for each, while it
trains.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_ring.algorithms.holdings import Holdings
from lightning_ring.comm.replicate import digest_of_model
from lightning_ring.elastic.catch_up.pace import SendingPace
from lightning_ring.elastic.catch_up.wire import Message
from lightning_ring.job.watch.messages import in_forked_children, watch_for_loss

PIECE_BYTES = 16 * 2**20  # of state, copied at once: a step may have to wait for one copy
# A newcomer is given up when more gradients are queued than both of these: bytes, and those of so
# many steps. When it gets no more state, and joins with what it has, says `SendingPace`.
LEAST_BEHIND_BYTES = 256 * 2**20
STEPS_BEHIND = 3
CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 2.0  # for the end of a thread

_log = logging.getLogger("lightning_ring")


class Source:
    """Sends the parameters and optimizer state that this rank holds to processes that ask for them.

    ``holdings`` returns them, or `None` as long as they cannot be sent. It is called while they
    stay as they are.

    The training calls `hold_still` when parameters and optimizer state stay as they are for a
    while, and `update` before they change. Both cost nothing while no process asks. Thread-safe.

    Attributes:
        refusal: Why no process gets any state; empty if they do.
        news: The lock of this object; notified when there is something to send.
        still_after: The number of steps after which the state stays as it is now; `None` while it
            may change.
    """

    def __init__(self, holdings: Callable[[], Holdings | None]) -> None:
        self.refusal = ""
        self.news = threading.Condition()
        self.still_after: int | None = None
        self.holdings = holdings
        self._feeds: list[_Feed] = []

    def feed(self, member: int, address: str, port: int, token: str) -> None:
        """Send to process ``member``, which listens at ``address``. Returns at once."""
        feed = _Feed(self, member, (address, port), token)
        with self.news:
            self._feeds.append(feed)
        try:
            feed.start()
        except RuntimeError as error:  # no more threads
            self.forget(feed)
            _log.warning("lightning_ring: no state can be sent to process %d: %s", member, error)

    def hold_still(self, step: int) -> None:
        """From here on the state is that after ``step`` steps, until `update`."""
        with self.news:
            self.still_after = step
            self.news.notify_all()

    def update(self, step: int, members: Collection[int]) -> None:
        """Say that the optimizers are about to take step number ``step``, with the averages that
        are in ``.grad``.

        Copies the gradients for processes that catch up. Waits while a piece of state is copied.
        Processes among ``members`` take the step themselves: nothing more is sent to them.
        """
        with self.news:
            self.still_after = None
            for feed in list(self._feeds):
                if feed.member in members:
                    feed.end()
                else:
                    feed.take_gradients(step)
            self.news.notify_all()

    def finish_feeds(self) -> None:
        """This rank is about to hold another part of the state: send what is queued, and nothing
        after that.
        """
        with self.news:
            self.still_after = None
            for feed in self._feeds:
                feed.finish()
            self.news.notify_all()

    def close(self, refusal: str) -> None:
        """End all connections. Processes that ask from now on get ``refusal``, the reason, and
        nothing else.
        """
        with self.news:
            self.refusal = refusal
            feeds = list(self._feeds)
            for feed in feeds:
                feed.end()
            self.news.notify_all()
        for feed in feeds:
            if feed.is_alive():
                feed.join(CLOSE_SECONDS)

    def forget(self, feed: _Feed) -> None:
        with self.news:
            self._feeds = [other for other in self._feeds if other is not feed]


class _Feed(threading.Thread):
    """Sends to one newcomer. `run` is the thread; all other methods are called with the lock
    ``news`` of the source.
    """

    def __init__(self, source: Source, member: int, address: tuple[str, int], token: str) -> None:
        super().__init__(name="ring-feed", daemon=True)
        self.member = member
        self._source = source
        self._address = address
        self._token = token
        self._connection: socket.socket | None = None
        self._queue: deque[Message] = deque()
        self._behind = 0  # bytes in the queue
        self._holdings: Holdings | None = None
        self._sent: list[int] = []  # of the pieces
        self._left: deque[int] = deque()
        self._pace = SendingPace()
        self._sends_state = False  # now
        self._told = False  # that all are sent
        self._ends = False  # when the queue is empty
        self._over = False

    def run(self) -> None:
        try:
            with socket.create_connection(self._address, CONNECT_SECONDS) as connection:
                self._connection = connection
                in_forked_children(self._let_go)
                connection.settimeout(None)
                watch_for_loss(connection)
                connection.sendall(self._token.encode())
                if refusal := self._source.refusal:
                    Message({"kind": "refused", "why": refusal}).send(connection)
                    return
                while (message := self._next()) is not None:
                    message.send(connection)
                    with self._source.news:
                        self._pace.sent(message.nbytes, is_state=self._sends_state)
        except OSError:
            pass  # it has died, or joins without
        except Exception as error:  # such as state that cannot be pickled
            self._say(f"{type(error).__name__}: {error}")
        finally:
            self._source.forget(self)

    def end(self) -> None:
        """Send nothing any more, also where the newcomer reads nothing."""
        self._over = True
        self._queue.clear()
        if (connection := self._connection) is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def finish(self) -> None:
        """Send what is queued, and nothing after that."""
        self._ends = True

    def take_gradients(self, step: int) -> None:
        """Queue the gradients of step number ``step``, of the pieces that were sent to the
        newcomer.
        """
        holdings = self._holdings
        if self._over or self._ends or holdings is None:
            return
        if not holdings.is_current():
            self.finish()
            return
        try:
            taken = {"gradients": self._gradients(holdings), "groups": _groups(holdings)}
            message = Message({"kind": "step", "step": step, **taken})
        except Exception as error:  # it must not end the training
            self._give_up(f"{type(error).__name__}: {error}")
            return
        self._queue.append(message)
        self._behind += message.nbytes
        if self._behind > max(
            LEAST_BEHIND_BYTES, STEPS_BEHIND * sum(piece.values.nbytes for piece in holdings.pieces)
        ):
            self._give_up(f"it is {self._behind / 2**20:.0f} MiB of gradients behind")
        elif self._left and self._pace.step():
            self._left.clear()  # what was sent goes on to be stepped
            self._say("gradients of what was sent leave no room for it")

    def _gradients(self, holdings: Holdings) -> dict[int, Tensor]:
        found = {}
        for number in list(self._sent):
            gradient = holdings.pieces[number].gradient()
            if gradient is not None and gradient.layout is not torch.strided:
                self._sent.remove(number)  # a parameter that is sent again when the newcomer joins
            elif gradient is not None:
                found[number] = gradient
        return found

    def _next(self) -> Message | None:
        """The message that is sent next: a queued step, else a piece of state. Blocks; `None` at
        the end.
        """
        source = self._source
        with source.news:
            self._sends_state = False
            while not self._over:
                if self._queue:
                    message = self._queue.popleft()
                    self._behind -= message.nbytes
                    return message
                if self._ends:
                    return None
                state = self._state(source.still_after) if source.still_after is not None else None
                if state is not None:
                    return state
                source.news.wait()
        return None

    def _state(self, step: int) -> Message | None:
        """The next message of state: a description, then pieces of `PIECE_BYTES` or more, then the
        word "all".

        `None` after that, and as long as this rank has nothing to send.
        """
        holdings = self._holdings
        if holdings is None:
            self._holdings = holdings = self._source.holdings()
            if holdings is None:
                return None
            self._left = deque(range(len(holdings.pieces)))
            return Message({"kind": "model", "step": step, **_description(holdings)})
        if not self._left:
            told, self._told = self._told, True
            return None if told else Message({"kind": "all", "step": step})
        piece: dict[int, Any] = {}
        size, states = 0, holdings.states()
        while self._left and size < PIECE_BYTES:
            number = self._left.popleft()
            held = holdings.pieces[number]
            piece[number] = held.values.detach(), [state.get(held.key) for state in states]
            size += sum(
                tensor.nbytes for tensor in tree_leaves(piece[number]) if isinstance(tensor, Tensor)
            )
        self._sent += piece
        self._sends_state = True
        return Message({"kind": "state", "step": step, "piece": piece})

    def _give_up(self, why: str) -> None:
        self.end()
        self._say(why)

    def _say(self, why: str) -> None:
        _log.warning(
            "lightning_ring: process %d gets the rest of its state when it joins, while the "
            "others wait: %s",
            self.member,
            why,
        )

    def _let_go(self) -> None:
        """A forked child must not keep the connection open."""
        if self._connection is not None:
            self._connection.close()


def _groups(holdings: Holdings) -> list[list[dict[str, Any]]]:
    return [
        [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        for optimizer in holdings.optimizers
    ]


def _description(holdings: Holdings) -> dict[str, Any]:
    """What the pieces are, and how many ranks send some, of which generation."""
    forms = [
        (piece.index, piece.first, piece.values.numel(), piece.strides) for piece in holdings.pieces
    ]
    digest = digest_of_model(holdings.module)
    return {"digest": digest, "pieces": forms, "senders": (holdings.senders, holdings.generation)}
