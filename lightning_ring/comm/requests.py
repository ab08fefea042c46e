"""Questions from rank to rank, in no order that all ranks share: threads answer them beside the computation."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_ring.comm import ring
from lightning_ring.comm.collective_thread import CollectiveThread, ThreadWork
from lightning_ring.comm.waiting import CHECK_SECONDS, WaitPolicy, transport_error
from lightning_ring.errors import CollectiveError, RingError

if TYPE_CHECKING:
    from lightning_ring.comm.ring_communicator import Transport

Answer = Callable[[int, Tensor], Tensor]
Use = Callable[[int, int, Tensor], object]

_TAG = 16  # another than those of collectives, and of Gloo's interrupts
_GOOD, _ERROR, _GOODBYE = 0, 1, 2  # told with the length of a message
_PIECE_BYTES = 64 * 2**20  # no message is longer than transports like
_IDLE_SECONDS = 1e7  # a peer may ask nothing for as long as it likes
_STUCK_SECONDS = 1.0


class Requests:
    """This rank asks other ranks, and answers their questions, at any time, over two ``transports`` of its own.

    One carries questions to lower ranks with their answers, the other one those to higher ranks. Between two ranks
    only one message then is under way over each. Over a single connection Gloo's notice that a receive is ready would
    queue behind this rank's own long message, so that the two ranks' messages would take turns on the wire.

    A question and its answer are 1-D uint8 tensors of any length. A thread for each peer answers its questions, one
    after another, with ``answer(peer, question)``. The next question overwrites that memory, and only then may the
    memory of the answer change. What ``answer`` raises is a `CollectiveError` where the question was asked. An error of
    the transport, or of a collective with the same ``policy``, ends all questions, and breaks the other communicators
    of the ``policy``.
    """

    def __init__(self, transports: tuple[Transport, Transport], policy: WaitPolicy, answer: Answer) -> None:
        self._transports = transports
        self._rank, world_size = transports[0].rank, transports[0].world_size
        self._policy = policy
        self._answer = answer
        self._asking = CollectiveThread(policy)
        self._received: dict[tuple[Transport, int], Tensor] = {}  # kept: fresh memory costs page faults
        self._stopped = False
        for transport in transports:
            transport.while_waiting = self._while_waiting
        peers = [peer for peer in range(world_size) if peer != self._rank]
        self._threads = {
            peer: threading.Thread(target=self._serve, args=(peer,), name=f"ring-answers-{peer}", daemon=True)
            for peer in peers
        }
        _open.add(self)

    def start(self) -> None:
        """Answer from now on: ``answer`` may be called before this returns."""
        for thread in self._threads.values():
            thread.start()

    def ask(self, questions: Mapping[int, Sequence[Tensor]], name: str, use: Use | None = None) -> Answers:
        """Ask each peer its questions, all at the same time, and without waiting for answers between them.

        Answers then come while later questions still go: a long message and its answer, cut in parts, travel at the
        same time. They may not change before `Answers.wait`. This rank itself may be among the peers.

        Args:
            questions: By peer.
            name: Stands in errors and stall reports.
            use: Called in a thread with the peer, the number of the question and the answer, in order for each peer.
                The next answer of that peer overwrites that memory.
        """
        self.check()  # where nobody waits for a peer that has failed, nothing else would tell
        answers: dict[int, tuple[int, Tensor]] = {}

        def take(peer: int, index: int, status: int, answer: Tensor) -> None:
            if answers.get(peer, (_GOOD,))[0] == _ERROR:
                return
            answers[peer] = status, answer.clone() if status == _ERROR else answer
            if status == _GOOD and use is not None:
                use(peer, index, answer)

        def run() -> None:
            others = {peer: self._asked_by_us(peer) for peer in questions if peer != self._rank}
            sends = {
                peer: [each for question in questions[peer] for each in self._send(transport, question, peer)]
                for peer, transport in others.items()
            }
            for index, question in enumerate(questions.get(self._rank, ())):
                take(self._rank, index, *self._answered(self._rank, question))
            for peer, transport in others.items():
                for index in range(len(questions[peer])):
                    take(peer, index, *self._receive(transport, peer))
            for peer, transport in others.items():
                transport.wait(sends[peer])

        return Answers(self._asking.submit(name, run), answers)

    def check(self) -> None:
        """Raise what ends a wait of ``answer``: this rank closes, a collective failed, or a peer."""
        if self._stopped:
            raise CollectiveError("this rank answers no more.")
        self._policy.raise_if_broken()
        self._policy.check_peers()

    def close(self, *, wait: bool = True) -> None:
        """Say goodbye, and wait until every peer has; with ``wait=False`` end what is under way. Twice is fine."""
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
        nothing = torch.empty(0, dtype=torch.uint8)
        goodbyes = {peer: self._send(self._asked_by_us(peer), nothing, peer, _GOODBYE) for peer in self._threads}
        for peer, sends in goodbyes.items():
            self._asked_by_us(peer).wait(sends)

    def _wait_for_threads(self) -> None:
        until = time.monotonic() + self._policy.seconds
        while asking := [peer for peer, thread in self._threads.items() if thread.is_alive()]:
            self.check()
            if time.monotonic() > until:
                raise self._policy.fail(self._policy.timeout_error("the end of questions between ranks", asking))
            self._threads[asking[0]].join(CHECK_SECONDS)

    # -- in the threads

    def _serve(self, peer: int) -> None:
        transport = self._asks_us(peer)
        sends: list[ring.Request] = []
        try:
            while True:
                status, question = self._receive(transport, peer)
                transport.wait(sends)  # the answer before, whose memory the next one may take
                if status == _GOODBYE:
                    return
                status, answer = self._answered(peer, question)
                sends = self._send(transport, answer, peer, status)
        except Exception as error:
            if not self._stopped:  # else the peer would wait for an answer that nobody gives
                self._policy.fail(transport_error(f"answers for rank {peer}", error))

    def _answered(self, peer: int, question: Tensor) -> tuple[int, Tensor]:
        try:
            return _GOOD, self._answer(peer, question)
        except Exception as error:
            text = str(error) if isinstance(error, RingError) else f"{type(error).__name__}: {error}"
            return _ERROR, torch.frombuffer(bytearray(text.encode() or b"unknown"), dtype=torch.uint8)

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

    def _send(self, transport: Transport, message: Tensor, peer: int, status: int = _GOOD) -> list[ring.Request]:
        length = transport.isend(torch.tensor([message.numel(), status]), peer, _TAG)
        return [length, *(transport.isend(piece, peer, _TAG) for piece in _pieces(message))]

    def _receive(self, transport: Transport, peer: int) -> tuple[int, Tensor]:
        head = torch.empty(2, dtype=torch.int64)
        transport.wait([transport.irecv(head, peer, _TAG)])
        size, status = head.tolist()
        kept = self._received.get((transport, peer))
        if kept is None or kept.numel() < size:
            kept = self._received[transport, peer] = torch.empty(size, dtype=torch.uint8)
        message = kept[:size]
        if size:
            transport.wait([transport.irecv(piece, peer, _TAG) for piece in _pieces(message)])
        return status, message


class Answers:
    """The answers to one `Requests.ask`, under way."""

    def __init__(self, work: ThreadWork, answers: Mapping[int, tuple[int, Tensor]]) -> None:
        self._work = work
        self._answers = answers

    def done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._work.done()

    def wait(self) -> dict[int, Tensor]:
        """By peer the answer to its last question, in memory that the next question to that peer overwrites.

        Raises:
            CollectiveError: A peer could not answer; or as `Work.wait`.
        """
        self._work.wait()
        for peer, (status, answer) in self._answers.items():
            if status == _ERROR:
                raise CollectiveError(f"rank {peer} answers: {bytes(answer.tolist()).decode(errors='replace')}")
        return {peer: answer for peer, (_, answer) in self._answers.items()}


def _pieces(message: Tensor) -> list[Tensor]:
    return list(message.split(_PIECE_BYTES)) if message.numel() else []


_open: weakref.WeakSet[Requests] = weakref.WeakSet()


@atexit.register
def _stop_threads() -> None:
    """A thread that comes back from Gloo or torch when the interpreter ends would abort the process."""
    for requests in list(_open):
        requests.close(wait=False)
