"""A rank that strangers come to: ``rank.py FOLDER STEPS [horovod]`` sums in every step, and writes
the sums at the end.
"""

import os
import resource
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

FILES = 1024  # as in test_strangers.py; ranks are forked by a server with another limit

folder, steps, minute = Path(sys.argv[1]), int(sys.argv[2]), timedelta(minutes=1)
resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
(folder / f"listens.{os.getpid()}").write_text(os.environ.get("RING_STORE", "").rpartition(":")[2])
time.sleep(0.5)  # strangers come before the job opens its doors
if "horovod" in sys.argv:
    import lightning_ring.horovod as hvd

    hvd.init()
    rank = hvd.rank()

    def total(value):
        return hvd.allreduce(value, op=hvd.Sum)

    assert hvd.broadcast_object({"from": rank}) == {"from": 0}
else:
    from lightning_ring.job.communicators import open_communicator
    from lightning_ring.job.job import connect
    from lightning_ring.job.ranks import discover_ranks

    job = connect(discover_ranks(), torch.device("cpu"), minute)
    comm = open_communicator(job, "auto", torch.device("cpu"), minute, minute)
    rank = comm.rank

    def total(value):
        job.check()
        comm.all_reduce_(value).wait()
        return value

    assert comm.all_gather_object(rank) == [0, 1]
(folder / f"up.{rank}").touch()
until = time.monotonic() + 30
while (folder / "strangers before").exists() and time.monotonic() < until:
    if list(folder.glob("attacked.*")):
        break
    time.sleep(0.02)
sums = []
for step in range(steps):
    sums.append(total(torch.full((100_000,), step + rank, dtype=torch.float))[0].item())
    assert sums[-1] == 2 * step + 1
    time.sleep(0.005)
(folder / f"{rank}.json").write_text(str(sums))
