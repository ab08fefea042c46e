"""What a rank of the stall tests does: meets the others again and again, while one of them comes
late.

``stall_script.py FOLDER [BACKEND]``: each rank writes ``pid.RANK``, at the end its error to
``error.RANK``.
"""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

from lightning_ring.errors import CollectiveError
from lightning_ring.job import stalls
from lightning_ring.job.communicators import open_communicator
from lightning_ring.job.job import connect
from lightning_ring.job.ranks import discover_ranks

stalls.RELAY_SECONDS = stalls.ANSWER_SECONDS = 0.7
FOLDER = Path(sys.argv[1])
WARNING = timedelta(seconds=1)
CPU = torch.device("cpu")


class Training:
    phase = ""

    def progress(self):
        return f"in phase {self.phase}"


def nap(seconds):
    time.sleep(seconds)  # the line that a report must show


def stop_for(seconds):
    subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def meet(job, name):
    tensor = torch.ones(1000)
    job.communicator.all_reduce_(tensor, name=name).wait()
    assert tensor[0] == job.info.world_size


def write_error(rank, error):
    """And wait for all ranks to have done so: the first one that ends ends the others."""
    (FOLDER / f"error.{rank}").write_text(str(error))
    until = time.monotonic() + 60
    while len(list(FOLDER.glob("error.*"))) < 3 and time.monotonic() < until:
        time.sleep(0.02)


def main():
    info = discover_ranks()
    job = connect(info, CPU, timedelta(seconds=60))
    rank = info.rank
    (FOLDER / f"pid.{rank}").write_text(str(os.getpid()))
    training = Training()
    job.stalls.tell_progress(training.progress)
    backend = sys.argv[2] if len(sys.argv) > 2 else "auto"
    open_communicator(job, backend, CPU, timedelta(seconds=60), WARNING)

    def phase(name, late, act, seconds):
        training.phase = name
        meet(job, f"before {name}")
        if rank == 0:
            print(f"phase {name}", file=sys.stderr, flush=True)
        if rank in late:
            act(seconds)
        meet(job, name)

    phase("slow", (1,), nap, 0.1)
    phase("asleep", (1,), nap, 5.0)
    phase("stopped", (2,), stop_for, 2.5)
    phase("rank 0 asleep", (0,), nap, 2.5)
    phase("rank 0 stopped", (0,), stop_for, 2.5)
    phase("after", (1,), nap, 0.3)  # rank 0 hears only now what it was asked while it was stopped
    open_communicator(job, backend, CPU, timedelta(seconds=2), WARNING)
    try:
        phase("timeout", (1,), nap, 5.0)
    except CollectiveError as error:
        write_error(rank, error)
        raise


if __name__ == "__main__":
    main()
