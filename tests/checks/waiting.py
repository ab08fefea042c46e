"""What a rank's waiting takes of the cores, run on both ranks of one mpirun by `tests.battery`."""

import os
import time
from pathlib import Path

import torch

from lightning_ring.algorithms.averaging import Averaging
from tests.checks.comm import BACKENDS, CPU, opened

LATE = 1.0  # seconds; a wait that spins would take as much of a core


def check_waiting_for_a_late_rank_takes_no_core():
    """Neither in the thread behind, while this one could compute, nor in the one that waits in
    the end.
    """
    for backend in BACKENDS:
        with opened(backend) as comm:
            flat = comm.empty(300_000, torch.float32, CPU).fill_(1)
            comm.all_reduce_(flat).wait()  # opens what the first one opens
            comm.barrier()
            began, used = time.monotonic(), time.process_time()
            if comm.rank == 1:
                time.sleep(LATE)
            work = comm.all_reduce_(flat)
            if comm.rank == 0:
                time.sleep(LATE / 2)
            work.wait()
            if comm.rank == 0:
                assert time.monotonic() - began > LATE * 0.9, backend
                assert time.process_time() - used < LATE / 2, backend
            comm.barrier()


def check_gloos_threads_let_those_finish_that_send_compressed_gradients():
    with opened("gloo") as comm:
        Averaging(compression="int8").attach(torch.nn.Linear(1, 1), [], comm)
        tasks = Path("/proc/self/task").iterdir()
        loops = [int(task.name) for task in tasks if b"gloo_tcp" in (task / "comm").read_bytes()]
        assert {os.sched_getscheduler(loop) for loop in loops} == {os.SCHED_BATCH}
