"""When the host reads whether some rank was asked to stop."""

import pytest
import torch
from torch.nn import Parameter

from lightning_ring.gradients.reducer import Reducer
from tests.fake_device import on_fake_device
from tests.thread_ranks import run_ranks


@pytest.mark.parametrize(("on_device", "agreed"), [(False, [0, 1, 1, 1]), (True, [0, 0, 1, 1])])
def test_no_device_is_waited_for_in_the_step_that_it_still_computes(on_device, agreed, monkeypatch):
    now = []  # the step that the device, as far as the host knows, may still be in

    def mark():
        step = now[-1]

        def reached():
            assert step < now[-1], "the host waits for the step that it has just sent"
            return True

        return reached

    def rank(comm):
        param = Parameter(torch.ones(3))
        ours = Reducer(comm, [("p", param)])
        answers = []
        for step in range(4):
            now.append(step)
            ours.stop_requested = comm.rank == 1 and step >= 1
            with ours.backward():
                param.sum().backward()
            comm.barrier()
            answers.append(int(ours.agreed_to_stop()))
            assert not ours.agreed_to_stop()  # asked and answered
            comm.barrier()
        return answers

    if on_device:
        on_fake_device(monkeypatch, mark)
    assert run_ranks(2, rank) == [agreed, agreed]
