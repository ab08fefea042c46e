"""Ranks as threads of one process: a `Communicator` without a transport, with the real queues,
ring and checks.
"""

import threading
import time
from collections import defaultdict, deque
from datetime import timedelta

from lightning_ring.comm.communicator import as_bytes
from lightning_ring.comm.ring_communicator import RingCommunicator
from lightning_ring.comm.waiting import CHECK_SECONDS, WaitPolicy
from lightning_ring.errors import CollectiveError, PeerFailedError, RingError


class ThreadWorld:
    """What the thread-ranks share: the messages between them, and the first rank that failed."""

    def __init__(self, world_size):
        self.world_size = world_size
        self.changed = threading.Condition()
        self.sent = defaultdict(deque)
        self.awaited = defaultdict(deque)
        self.failed = None

    def post(self, mine, src, dst, tag, *, receives):
        """Match a send with the oldest open receive of the same pair and tag, or a receive with
        the oldest send.
        """
        ours, theirs = (self.awaited, self.sent) if receives else (self.sent, self.awaited)
        with self.changed:
            if not theirs[src, dst, tag]:
                ours[src, dst, tag].append(mine)
                return
            other = theirs[src, dst, tag].popleft()
            source, target = (other, mine) if receives else (mine, other)
            if source.payload.numel() != target.payload.numel():
                raise CollectiveError(
                    f"rank {src} sent {source.payload.numel()} bytes, rank {dst} expected "
                    f"{target.payload.numel()}."
                )
            target.payload.copy_(source.payload)
            source.over = target.over = True
            self.changed.notify_all()

    def fail(self, rank, error):
        with self.changed:
            self.failed = self.failed or (rank, error)
            self.changed.notify_all()

    def raise_if_failed(self):
        if self.failed is not None:
            rank, error = self.failed
            raise PeerFailedError(f"rank {rank} failed: {type(error).__name__}: {error}")


class Message:
    """One side of a message: a send or a receive."""

    __slots__ = ("over", "payload", "peer")

    def __init__(self, payload, peer):
        self.payload = payload
        self.peer = peer
        self.over = False


class ThreadTransport:
    """`PointToPoint` of one thread-rank. The receiver's copy ends a message, so sending copies
    nothing.
    """

    def __init__(self, world, rank, connection=0):
        self._world = world
        self.connection = connection
        self._num_duplicates = 0
        self.rank = rank
        self.world_size = world.world_size
        self.while_waiting = lambda peers: 0.0

    def isend(self, tensor, dst, tag=0):
        message = Message(as_bytes(tensor), dst)
        self._world.post(message, self.rank, dst, 1000 * self.connection + tag, receives=False)
        return message

    def irecv(self, tensor, src, tag=0):
        message = Message(as_bytes(tensor), src)
        self._world.post(message, src, self.rank, 1000 * self.connection + tag, receives=True)
        return message

    def wait(self, requests):
        with self._world.changed:
            while not all(request.over for request in requests):
                self._world.changed.wait(CHECK_SECONDS)
                self._world.raise_if_failed()
                self.while_waiting([request.peer for request in requests if not request.over])

    def interrupt(self):
        return None  # waits ask every 20 ms

    def duplicate(self, policy):
        self._num_duplicates += 1
        return ThreadTransport(self._world, self.rank, self._num_duplicates)

    def close(self, broken):
        return None


class ThreadCommunicator(RingCommunicator):
    """A `Communicator` among the threads of one `ThreadWorld`."""

    def __init__(self, world, rank, policy, *, num_channels=1):
        super().__init__(ThreadTransport(world, rank), policy, num_channels=num_channels)


def run_ranks(world_size, fn, *, timeout=timedelta(seconds=60), num_channels=1):
    """Run ``fn(comm)`` on ``world_size`` thread-ranks and return their results, by rank.

    When one raises, the others' collectives end at once and the first error is raised here.
    ``timeout`` bounds each collective and the whole.

    Raises:
        RingError: Some rank did not return within ``timeout``.
    """
    world = ThreadWorld(world_size)
    results = {}

    def run_rank(rank):
        comm = ThreadCommunicator(
            world, rank, WaitPolicy(timeout, world.raise_if_failed), num_channels=num_channels
        )
        try:
            results[rank] = fn(comm)
        except BaseException as error:
            world.fail(rank, error)
        comm.close()

    threads = [
        threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + timeout.total_seconds() + 1
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if world.failed is not None:
        raise world.failed[1]
    if len(results) < world_size:
        missing = sorted(set(range(world_size)) - set(results))
        error = RingError(f"ranks {missing} did not return within {timeout.total_seconds():g} s")
        world.fail(missing[0], error)
        raise error
    return [results[rank] for rank in range(world_size)]
