"""What a rank of the process tests does: joins the job, then behaves as ``argv[1]`` says at rank 1.

Rank 0 meanwhile waits as a communicator does, calling `JobWatch.check`, or with ``sleep`` in a way
that nothing can interrupt. ``argv[2]`` is a folder: each rank writes its pid there, and what it
lived to see.
"""

import contextlib
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed

from lightning_ring.job.excepthook import end_job_on_error
from lightning_ring.job.ranks import discover_ranks
from lightning_ring.job.rendezvous.store import agree_on_secret, open_store
from lightning_ring.job.watch.watch import JobWatch

action, folder = sys.argv[1], Path(sys.argv[2])
info = discover_ranks()
end_job_on_error(info)
store = open_store(info, timedelta(seconds=60))
watch = JobWatch(info, store, agree_on_secret(info, store))
end_job_on_error(info, watch)
# as in a real job; torch wraps sys.excepthook here
torch.distributed.init_process_group(
    "gloo", store=store, rank=info.rank, world_size=info.world_size
)
if number := os.environ.get("RING_STOP_SIGNAL"):
    signal.signal(int(number), lambda *_: None)
(folder / f"pid.{info.rank}").write_text(str(os.getpid()))
print(f"rank {info.rank} of {info.world_size} is up, {info.source}", flush=True)


def wait_for_the_others(check):
    begin = time.monotonic()
    while time.monotonic() - begin < 600:
        check()
        time.sleep(0.01)


store.set(f"joined{info.rank}", "1")
store.wait([f"joined{rank}" for rank in range(info.world_size)])
if action == "finish":
    time.sleep(0.3 * info.rank)  # rank 0 ends first
elif action == "raise-all-caught":
    try:
        raise ValueError(f"rank {info.rank} raises")
    except ValueError as error:
        watch.report(error)
    time.sleep(1.0)
    watch.reset()
    time.sleep(0.5)
    watch.check()  # the next fit starts clean
elif action == "gloo" and info.rank != 1:  # it sees a closed connection, not why
    torch.distributed.all_reduce(torch.ones(1))
elif action in ("sleep", "wait") or info.rank != 1:
    wait_for_the_others(int if action == "sleep" else watch.check)
elif action in ("raise", "gloo"):
    raise ValueError("no such photo")
elif action == "exit-3":
    sys.exit(3)
elif action == "caught-exit":
    with contextlib.suppress(SystemExit):
        sys.exit(5)
    raise KeyError("after a caught exit")
elif action == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
else:
    raise NotImplementedError(action)
(folder / f"end.{info.rank}").write_text("reached")
