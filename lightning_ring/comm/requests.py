"""Questions from rank to rank, in no order that all ranks share: threads answer them beside the
computation.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_ring.comm.collective_thread import CollectiveThread
from lightning_ring.comm.transport import Request, Transport
from lightning_ring.comm.waiting import CHECK_SECONDS, WaitPolicy, transport_error
from lightning_ring.errors import CollectiveError, RingError

Answer = Callable[[int, Tensor], Tensor]

_TAG = 16  # another than those of collectives, and of Gloo's interrupts
_GOODBYE = -1  # in the place of a question's length
_PIECE_BYTES = 64 * 2**20  # no message is longer than transports like
_IDLE_SECONDS = 1e7  # a peer may ask nothing for as long as it likes
_STUCK_SECONDS = 1.0


class Requests:
    """This rank asks other ranks, and answers their questions, at any time, over two ``transports``
    of its own.

    One carries questions to lower ranks with their answers, the other one those to higher ranks.
    Between two ranks only one message then is under way over each. Over a single connection Gloo's
    notice that a receive is ready would queue behind this rank's own long message, so that the two
    ranks' messages would take turns on the wire.

    A question and its answer are 1-D uint8 tensors of any length. A thread for each peer answers
    its questions, one after another, with ``answer(peer, question)``. The question's memory may
    change with the next question, and that of the answer with the next `ask`. Both lengths travel
    before a question, so that both ranks begin to receive before they need a message, and none
    waits until a thread of the other rank gets a core. What ``answer`` or the
    transport raises, or a collective with the same ``policy``, ends all questions of this rank, and
    breaks the other communicators of the ``policy``.
    """

    def __init__(
        self, transports: tuple[Transport, Transport], policy: WaitPolicy, answer: Answer
    ) -> None:
        self._transports = transports
        self._rank, world_size = transports[0].rank, transports[0].world_size
        self._policy = policy
        self._answer = answer
        self._asking = CollectiveThread(policy)
        # kept: fresh memory costs page faults
        self._received: dict[tuple[Transport, int], Tensor] = {}
        self._stopped = False
        for transport in transports:
            transport.while_waiting = self._while_waiting
        peers = [peer for peer in range(world_size) if peer != self._rank]
        self._threads = {
            peer: threading.Thread(
                target=self._serve, args=(peer,), name=f"ring-answers-{peer}", daemon=True
            )
            for peer in peers
        }
        _open.add(self)

    def start(self) -> None:
        """Answer from now on: ``answer`` may be called before this returns."""
        for thread in self._threads.values():
            thread.start()

    def ask(
        self, questions: Mapping[int, Tensor], name: str, lengths: Mapping[int, int]
    ) -> dict[int, Tensor]:
        """Ask each peer its question, all at the same time; returns the answers by peer, in memory
        that the next question to that peer overwrites. This rank itself may be among the peers.

        Args:
            name: Stands in errors and stall reports.
            lengths: Of the answers, in bytes.
        """
        self.check()  # where nobody waits for a peer that has failed, nothing else would tell
        answers: dict[int, Tensor] = {}

        def run() -> None:
            others = {peer: self._asked_by_us(peer) for peer in questions if peer != self._rank}
            receives, sends = {}, {}
            for peer, transport in others.items():
                answers[peer], receives[peer] = self._receive(transport, peer, lengths[peer])
            for peer, transport in others.items():
                head = _head(questions[peer].numel(), lengths[peer])
                sends[peer] = self._send(transport, peer, [head, questions[peer]])
            if (own := questions.get(self._rank)) is not None:
                answers[self._rank] = self._answered(self._rank, own, lengths[self._rank])
            for peer, transport in others.items():
                transport.wait(receives[peer])
                transport.wait(sends[peer])

        self._asking.submit(name, run).wait()
        return answers

    def check(self) -> None:
        """Raise what ends a wait of ``answer``: this rank closes, a collective failed, or a
        peer.
        """
        if self._stopped:
            raise CollectiveError("this rank answers no more.")
        self._policy.raise_if_broken()
        self._policy.check_peers()

    def close(self, *, wait: bool = True) -> None:
        """Say goodbye, and wait until every peer has; with ``wait=False`` end what is under way.
        Twice is fine.
        """
        if self._stopped:
            return
        ended = False
        try:
            if wait and self._policy.error is None:
                self._asking.submit("goodbye", self._say_goodbye).wait()
                self._wait_for_threads()
                ended = True
        finally:
            self._stopped = True
            if not ended:
                for transport in self._transports:
                    transport.interrupt()
            for thread in filter(threading.Thread.is_alive, self._threads.values()):
                thread.join(_STUCK_SECONDS)
            self._asking.close()
            for transport in self._transports:
                transport.close(broken=not ended)

    def _say_goodbye(self) -> None:
        goodbyes = {
            peer: self._send(self._asked_by_us(peer), peer, [_head(_GOODBYE)])
            for peer in self._threads
        }
        for peer, sends in goodbyes.items():
            self._asked_by_us(peer).wait(sends)

    def _wait_for_threads(self) -> None:
        until = time.monotonic() + self._policy.seconds
        while asking := [peer for peer, thread in self._threads.items() if thread.is_alive()]:
            self.check()
            if time.monotonic() > until:
                raise self._policy.fail(
                    self._policy.timeout_error("the end of questions between ranks", asking)
                )
            self._threads[asking[0]].join(CHECK_SECONDS)

    # -- in the threads

    def _serve(self, peer: int) -> None:
        transport = self._asks_us(peer)
        try:
            head = _head()
            arrival = transport.irecv(head, peer, _TAG)
            while True:
                transport.wait([arrival])
                size, length = head.tolist()
                if size == _GOODBYE:
                    return
                question, receives = self._receive(transport, peer, size)
                transport.wait(receives)
                sends = self._send(transport, peer, [self._answered(peer, question, length)])
                arrival = transport.irecv(head, peer, _TAG)
                transport.wait(sends)
        except Exception as error:
            if not self._stopped:  # else the peer would wait for an answer that nobody gives
                named = transport_error(f"answers for rank {peer}", error)
                self._policy.fail(error if isinstance(error, RingError) else named)

    def _answered(self, peer: int, question: Tensor, length: int) -> Tensor:
        answer = self._answer(peer, question)
        assert answer.numel() == length, f"{answer.numel()} bytes where {length} were asked for"
        return answer

    def _while_waiting(self, peers: Sequence[int]) -> float:
        if self._asking.is_run_by(threading.current_thread()):
            return self._asking.while_waiting(peers)
        if self._stopped:
            raise CollectiveError("this rank answers no more.")
        self._policy.raise_if_broken()
        return _IDLE_SECONDS

    # -- messages

    def _asked_by_us(self, peer: int) -> Transport:
        """What carries this rank's questions to ``peer``, and their answers."""
        return self._transports[peer > self._rank]

    def _asks_us(self, peer: int) -> Transport:
        """What carries ``peer``'s questions to this rank, and their answers."""
        return self._transports[self._rank > peer]

    def _send(self, transport: Transport, peer: int, messages: Sequence[Tensor]) -> list[Request]:
        return [
            transport.isend(piece, peer, _TAG) for message in messages for piece in _pieces(message)
        ]

    def _receive(self, transport: Transport, peer: int, size: int) -> tuple[Tensor, list[Request]]:
        """A message of ``size`` bytes, which arrives with the requests."""
        kept = self._received.get((transport, peer))
        if kept is None or kept.numel() < size:
            kept = self._received[transport, peer] = torch.empty(size, dtype=torch.uint8)
        message = kept[:size]
        return message, [transport.irecv(piece, peer, _TAG) for piece in _pieces(message)]


def _head(size: int = 0, of_answer: int = 0) -> Tensor:
    """The lengths of a question and of its answer."""
    return torch.tensor([size, of_answer])


def _pieces(message: Tensor) -> list[Tensor]:
    return list(message.split(_PIECE_BYTES)) if message.numel() else []


_open: weakref.WeakSet[Requests] = weakref.WeakSet()


@atexit.register
def _stop_threads() -> None:
    """A thread that comes back from Gloo or torch when the interpreter ends would abort the
    process.
    """
    for requests in list(_open):
        requests.close(wait=False)
