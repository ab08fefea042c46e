"""A rank's connection to the steward, and a thread that reads it. Without torch."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lightning_ring.elastic.membership import GenerationOver, JobEnded, Report, TooFewRanks, View
from lightning_ring.elastic.steward import DOOR
from lightning_ring.errors import PeerFailedError, RankDiscoveryError
from lightning_ring.job.exit import end_process, say
from lightning_ring.job.rendezvous.door import knock
from lightning_ring.job.watch.messages import Message, MessageConnection, in_forked_children

CONNECT_SECONDS = 30.0
FINISH_SECONDS = 10.0
_LOST_SECONDS = 2.0


class Member:
    """This process in the job of the steward that ``environ`` names. Opened by `open`; thread-safe.

    ``on_stop`` is called in the member's thread when the current generation is over, with the error
    that ends its collectives. It must be quick. ``on_lost`` is called when the steward has gone,
    and ends this process: two halves of a job must not go on apart. ``over_error`` is the class of
    the error of a generation that is over.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.number = int(environ["RING_MEMBER"])
        self._host, _, port = environ["RING_STEWARD"].rpartition(":")
        self._port = int(port)
        self._secret = environ["RING_SECRET"]
        self.view: View | None = None
        self.newcomers_wait = False
        # number of ranks when the training began, before this process; 0: it had not begun
        self.first_ranks: int | None = None
        self.on_stop: Callable[[PeerFailedError], None] = lambda error: None
        self.on_lost: Callable[[], None] = self._end_process
        self.over_error: type[GenerationOver] = GenerationOver
        self._stopped_generation = -1
        self._connection: MessageConnection | None = None
        self._sending = threading.Lock()
        self._news = threading.Condition()
        self._next: View | None = None
        self._over: PeerFailedError | None = None
        self._answers: dict[int, Message | None] = {}
        self._num_requests = 0
        self._finish_is_known = False
        self._lost = False
        self._closed = False

    @classmethod
    def is_wanted(cls, environ: Mapping[str, str] = os.environ) -> bool:
        return "RING_STEWARD" in environ

    @property
    def generation(self) -> int:
        return -1 if self.view is None else self.view.generation

    @property
    def rank(self) -> int:
        assert self.view is not None, "next_view() comes first"
        return self.view.members.index(self.number)

    @property
    def address(self) -> str:
        """This host's address on the way to the steward."""
        assert self._connection is not None, "open() comes first"
        address: str = self._connection.socket.getsockname()[0]
        return address

    def open(self) -> None:
        """Connect to the steward.

        Raises:
            RankDiscoveryError: It cannot be reached, or another process is this one already.
        """
        place, hello = ([self._host], self._port), {"member": self.number, "pid": os.getpid()}
        try:
            self._connection, _ = knock(
                *(*place, self._secret, DOOR, hello, CONNECT_SECONDS),
                answer_seconds=CONNECT_SECONDS,
            )
        except PermissionError as refusal:
            raise RankDiscoveryError(
                f"The steward does not take this process (pid {os.getpid()}): {refusal}. A "
                "program that a rank starts inherits RING_STEWARD and RING_MEMBER: start it "
                "without them."
            ) from refusal
        except OSError as error:
            raise RankDiscoveryError(
                f"Process {self.number} could not reach the steward at {self._host}:{self._port} "
                f"({error}), which started it and has probably ended."
            ) from error
        in_forked_children(self._forget)
        threading.Thread(target=self._listen, name="ring-member", daemon=True).start()
        with self._news:
            if not self._news.wait_for(
                lambda: self.first_ranks is not None or self._lost, CONNECT_SECONDS
            ):
                raise RankDiscoveryError(
                    f"The steward did not say within {CONNECT_SECONDS:g} s where its job stands."
                )

    def check(self) -> None:
        """Raise `GenerationOver` or `JobEnded` once the current generation is over."""
        if self._over is not None:
            raise self._over

    def is_over(self, seconds: float = 0.0) -> bool:
        """Whether the generation is over, or ends within ``seconds``. Transports may know
        earlier."""
        with self._news:
            return self._news.wait_for(lambda: self._over is not None, seconds)

    def report(self, report: Report) -> None:
        """Say where this rank stands. It then writes nothing that another rank reads until the next
        view."""
        self._send({"kind": "report", "generation": self.generation, **asdict(report)})

    def next_view(self, timeout: float) -> View:
        """The view that follows the current one, now in force. Blocks up to ``timeout`` seconds.

        Raises:
            JobEnded: There is none.
        """
        with self._news:
            if not self._news.wait_for(
                lambda: self._next or isinstance(self._over, JobEnded), timeout
            ):
                raise JobEnded(f"There was no next view of the ranks within {timeout:g} s.")
            if isinstance(self._over, JobEnded):
                raise self._over
            assert self._next is not None
            stopped = (
                isinstance(self._over, GenerationOver)
                and self._stopped_generation == self._next.generation
            )
            self.view, self._next = self._next, None
            self._over = self._over if stopped else None
        return self.view

    def request(self, message: dict[str, Any], timeout: float) -> Any:
        """The store's answer to ``message`` (`KeyValue`). Blocks.

        Raises:
            GenerationOver: The generation is over, before the answer or during the wait for it.
            TimeoutError: The keys were not there within ``timeout`` seconds.
        """
        generation = self.generation
        with self._news:
            self._num_requests += 1
            number = self._num_requests
            self._answers[number] = None
        self._send({"kind": "store", "generation": generation, "number": number, **message})
        with self._news:
            there = self._news.wait_for(lambda: self._answers[number] is not None, timeout)
            answer = self._answers.pop(number)
        if not there or answer is None:
            raise TimeoutError(
                f"{message['op']} of {message.get('keys') or message.get('key')}: "
                f"none in {timeout:g} s"
            )
        if "refused" in answer:
            self.check()
            raise self.over_error(answer["refused"])
        return answer["value"]

    def finish(self) -> None:
        """Say that this rank has finished the training; it takes part in no later view.

        Returns once the steward knows: a process that ends without that has failed.
        """
        self._send({"kind": "finished"})
        with self._news:
            self._news.wait_for(lambda: self._finish_is_known or self._lost, FINISH_SECONDS)

    def take_part(self) -> None:
        """Say that this newcomer has finished its first step."""
        self._send({"kind": "takes_part"})

    def leave_fit(self, left: bool = True) -> None:
        """Say that this rank has left a fit, so that a death now ends the job; or begins
        another."""
        self._send({"kind": "leaves_fit", "left": left})

    def turn_away(self, members: Sequence[int]) -> None:
        """Say that the newcomers ``members`` of the view do not fit: they leave for good."""
        self._send({"kind": "turns_away", "members": list(members)})

    def fail(self, text: str, exit_code: int = 1) -> None:
        """End the job with ``exit_code`` because this rank's program failed."""
        self._send({"kind": "failed", "text": text, "exit_code": exit_code})

    def close(self) -> None:
        """Hang up. The steward takes a member that has not finished for dead."""
        self._closed = True
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread

    def _send(self, message: Message) -> None:
        connection = self._connection
        assert connection is not None, "open() comes first"
        with self._sending:
            connection.send(message)
            until = time.monotonic() + CONNECT_SECONDS
            while connection.unsent and time.monotonic() < until:
                connection.wait(1.0, to_send=True)
                connection.flush()

    def _listen(self) -> None:
        connection = self._connection
        assert connection is not None
        over = None
        while over is None and not self._closed:
            connection.wait(1.0)
            messages, over = connection.receive()
            for message in messages:
                self._take(message)
        with self._news:
            self._lost = True
            self._news.notify_all()
        if not self._closed and not isinstance(self._over, JobEnded):
            self.on_lost()

    def _end_process(self) -> None:
        time.sleep(_LOST_SECONDS)  # whoever guards the ranks says so, and kills them
        say(f"process {self.number} ends: the steward, which started it, has gone")
        end_process(1)

    def _take(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "ping":
            self._send({"kind": "pong"})
            return
        stop: PeerFailedError | None = None
        with self._news:
            if kind == "standing":
                self.first_ranks = message["first_ranks"]
            elif kind == "view":
                self._next = View.from_message(message)
                self.newcomers_wait = False
            elif kind == "newcomers":
                self.newcomers_wait = True
            elif kind == "noted":
                self._finish_is_known = True
            elif kind == "answer":
                if message["number"] in self._answers:
                    self._answers[message["number"]] = message
            elif kind == "stop":
                self._stopped_generation = message["generation"]
                stop = self.over_error(
                    f"Generation {message['generation']} is over: {message['why']}."
                )
            elif kind == "end":
                ended = TooFewRanks if message["too_few"] else JobEnded
                stop = ended(f"The job ends: {message['why']}.", message["exit_code"])
            if stop is not None and not isinstance(self._over, JobEnded):
                self._over = stop
            self._news.notify_all()
        if stop is not None:
            self.on_stop(stop)

    def _forget(self) -> None:
        """A forked child (a data-loader worker) must not keep the connection open."""
        if self._connection is not None:
            self._connection.close()
