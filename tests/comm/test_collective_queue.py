"""Who moves a collective on: its caller, or the thread behind it; and what becomes of that
thread at exit.
"""

import sys
import threading
import time

import pytest
import torch

from lightning_ring.comm import collective_queue
from lightning_ring.comm.collective_queue import CollectiveQueue
from lightning_ring.comm.waiting import WaitPolicy
from tests.processes import run, wait_for


class Steps:
    """A collective of two steps: which threads took them, once ``peers_are_here``."""

    def __init__(self):
        self.threads = []
        self.peers_are_here = False

    def queue(self):
        return CollectiveQueue(WaitPolicy(), lambda number: self.peers_are_here, lambda number: [])

    def run(self):
        yield 1
        self.threads.append(threading.get_ident())


def test_what_nobody_waits_for_is_taken_up_behind():
    steps = Steps()
    queue = steps.queue()
    work = queue.submit("bucket 0", steps.run(), background=True)
    steps.peers_are_here = True
    wait_for(lambda: work.over)
    assert steps.threads != [threading.get_ident()]
    queue.close()


def test_a_fresh_collective_is_left_to_its_caller(monkeypatch):
    """An alarm that was set for an earlier one must not make the thread take it."""
    monkeypatch.setattr(collective_queue, "WAKE_SECONDS", 20.0)
    steps = Steps()
    queue = steps.queue()
    work = queue.submit("bucket 0", steps.run(), background=True)
    steps.peers_are_here = True
    queue._alarm.ring()
    time.sleep(0.2)
    assert not work.over
    work.wait()
    assert steps.threads == [threading.get_ident()]
    queue.close()


def test_the_last_to_call_leaves_the_work_to_a_spare_core():
    steps = Steps()
    steps.peers_are_here = True
    queue = steps.queue()
    queue.spare_cores = True
    short = queue.submit("flags", steps.run(), background=False)
    assert short.over
    assert steps.threads == [threading.get_ident()]
    long = queue.submit("bucket 0", steps.run(), background=True)
    wait_for(lambda: long.over)
    assert steps.threads[1] != threading.get_ident()
    queue.close()


ENDS_BUSY = """
import time, torch
from lightning_ring.comm.collective_queue import CollectiveQueue
from lightning_ring.comm.waiting import WaitPolicy
torch.set_num_threads(1)
began, tensor, taken = time.monotonic(), torch.zeros(300_000), []
def steps():
    yield 1
    while True:
        taken.append(tensor.add_(1))
        yield 1
queue = CollectiveQueue(WaitPolicy(), lambda number: time.monotonic() > began + 0.05, lambda number: [])
queue.submit("bucket 0", steps(), background=True)
while len(taken) < 10:
    time.sleep(0.001)
"""


@pytest.mark.ranks
def test_a_process_may_end_while_the_thread_behind_is_inside_torch():
    ended = run([sys.executable, "-c", ENDS_BUSY])
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize("behind", [False, True])
def test_tensors_of_inference_mode(behind):
    """Changing one outside of the mode is an error, and the thread behind is in no mode of its
    caller's.
    """
    steps = Steps()
    queue = steps.queue()
    with torch.inference_mode():
        tensor = torch.zeros(3)

        def add():
            yield 1
            tensor.add_(1)

        work = queue.submit("bucket 0", add(), background=behind)
        steps.peers_are_here = True
        wait_for(lambda: work.over or not behind)
    work.wait()
    assert tensor.tolist() == [1, 1, 1]
    queue.close()
