"""Collectives that take as long as on a wire: no early read, no early write.

One rank trains through the real NCCL backend of lightning_ring, over a stand-in for the group. A
collective runs on a stream of its own, after the caller's current stream: it copies the tensor
away, fills its memory with NaN, sleeps as long as a slow wire would need, and puts the result back.
At the first `wait` it lets go of the tensors, as torch's NCCL works do. Whoever reads too early
reads NaN, and what is written too early is lost, or is sent: training then gives other parameters
than without communication.

It proves the order of streams. It does not prove how much of a wire's time is hidden, nor more
ranks than one, and with them mirrors: see `test_thread_ranks`.
"""

from functools import partial

import pytest
import torch
from torch.optim import SGD, AdamW

from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.comm.backends import nccl
from lightning_ring.comm.backends.nccl import NCCLCommunicator
from lightning_ring.comm.communicator import as_bytes
from lightning_ring.comm.recording import RecordedCommunicator
from lightning_ring.comm.waiting import WaitPolicy
from tests.comm.backends.fake_nccl import CPUTensorsOverNCCL, FakeDistributed
from tests.compressors import COMPRESSORS, MESSAGES
from tests.gpu import DEVICE, ON_GPU
from tests.gpu.test_thread_ranks import largest, net_of, train
from tests.thread_ranks import ThreadCommunicator, ThreadWorld

pytestmark = ON_GPU
CYCLES_PER_BYTE = 30  # some 0.05 GB/s
WHOLE = ("all_reduce", "broadcast")  # the other collectives are halves of an all-reduce


class LateWork:
    """A work of torch.distributed. ``held`` lives until the first `wait`."""

    def __init__(self, held, over, arrive=None):
        self._held = held
        self._over = over
        self._arrive = arrive

    def wait(self, *args):
        if self._over is not None:
            torch.cuda.current_stream().wait_event(self._over)
        elif self._arrive is not None:
            self._arrive()
        self._held = self._arrive = None
        return True

    def is_completed(self):
        return bool(self._over.query()) if self._over is not None else self._arrive is None


class DelayedGroup:
    """The process group of the only rank. Without ``delays`` a collective ends at once, and the
    caller waits.
    """

    def __init__(self, *, delays):
        self._delays = delays
        # As NCCL's kernels, it does not queue for SMs after all blocks of a convolution.
        self._stream = torch.cuda.Stream(priority=-1) if DEVICE == "cuda" else None

    def _get_backend(self, device):
        return self

    @torch.no_grad()
    def start(self, kind, op, sent, output, how):
        several = isinstance(sent, list)
        sources, targets = (sent, output) if several else ([sent], [output])

        @torch.no_grad()
        def arrive(aside):
            # What was not taken away is read now: whoever writes to it early changes the result.
            copies = [aside.get(tensor.data_ptr(), tensor) for tensor in sources]
            how([copies if several else copies[0]], [output])

        if self._stream is None:
            work = LateWork((sent, output), None, partial(arrive, take_away(sources, targets)))
        else:
            caller = torch.cuda.current_stream()
            self._stream.wait_stream(caller)
            with torch.cuda.stream(self._stream):
                aside = take_away(sources, targets)
                # The caller's stream goes on once the memory is NaN: no read is too early for that.
                caller.wait_stream(self._stream)
                num_bytes = sum(tensor.nbytes for tensor in sources)
                if self._delays:
                    cycles = num_bytes * CYCLES_PER_BYTE
                    torch.cuda._sleep(cycles if kind in WHOLE else cycles // 2)
                arrive(aside)
                over = torch.cuda.Event()
                over.record()
            work = LateWork((sent, output), over)
        if not self._delays:
            work.wait()
        return work


def take_away(sent, outputs):
    """What is sent in place, by its address; its memory is NaN, and so is that of other results.

    The rest may be read meanwhile, as NCCL reads it.
    """
    places = {tensor.data_ptr(): tensor for tensor in outputs}
    aside = {t.data_ptr(): t.clone() for t in sent if t.data_ptr() in places}
    for tensor in places.values():
        as_bytes(tensor).fill_(255)  # NaN in every type that has one
    return aside


def ring_over(*, delays=True):
    host = ThreadCommunicator(ThreadWorld(1), 0, WaitPolicy())
    backend = NCCLCommunicator if DEVICE == "cuda" else CPUTensorsOverNCCL
    return backend(DelayedGroup(delays=delays), host)


def largest_difference(algorithm, *, recorded, compressed=False, accumulates=False):
    """Training over a slow wire, beside one process; with a compressor beside a wire that is none.

    ``recorded``: with a listener, as the monitor is one.
    """
    features = {"accumulates": accumulates, "clips": True}

    def over(comm):
        if recorded:
            comm = RecordedCommunicator(comm, [lambda record: None])
        return train(comm, net, algorithm(), make, **features)

    net = net_of(torch.float32 if compressed else torch.float64)
    make = partial(SGD, lr=0.1) if compressed else partial(AdamW, lr=0.01)
    if compressed:
        expected = over(ring_over(delays=False))
    else:
        expected = train(None, net, Algorithm(), make, **features)
    found = over(ring_over())
    return largest((values - expected[name]).abs().max() for name, values in found.items())


@pytest.fixture(autouse=True)
def _over_the_fake(monkeypatch):
    monkeypatch.setattr(nccl, "dist", FakeDistributed())
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.mark.parametrize("algorithm", [Averaging, Sharded])
def test_training(algorithm, monkeypatch):
    small = partial(largest_difference, partial(algorithm, bucket_cap_mb=0.02))
    assert small(recorded=False) <= 1e-12
    assert small(recorded=True) <= 1e-12
    assert small(recorded=True, accumulates=True) <= 1e-12
    monkeypatch.setattr(LateWork, "wait", lambda self: True)
    with pytest.raises((AssertionError, RuntimeError)):
        assert small(recorded=False) <= 1e-12


@pytest.mark.parametrize("name", MESSAGES)
def test_compressors(name):
    def compressing():
        return Averaging(bucket_cap_mb=0.02, compression=COMPRESSORS[name]())

    assert largest_difference(compressing, recorded=True, compressed=True) <= 1e-6
