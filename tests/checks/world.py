"""The communicator that checks run on: chosen by ``RING_CHECK_BACKEND``, opened once in each
rank of a battery.
"""

import logging
import os
from contextlib import contextmanager
from datetime import timedelta
from functools import cache

import pytest
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)


@contextmanager
def raised_by_all(kind, message):
    """Around code that raises the same error on every rank."""
    from tests.checks.ranks import WORLD

    with pytest.raises(kind, match=message) as caught:
        yield caught
    assert len(set(WORLD.allgather(str(caught.value)))) == 1


@contextmanager
def said():
    """What this package logs."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("lightning_ring").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("lightning_ring").removeHandler(handler)


@cache
def open_gloo():
    """torch.distributed's default group over Gloo, unless it is up; rank 0's port travels over
    MPI.
    """
    if dist.is_initialized():  # on all ranks: an earlier check left it
        return
    # deferred: pytest imports this file too, and MPI must start in the ranks only
    from tests.checks.ranks import WORLD as world

    store = (
        dist.TCPStore("127.0.0.1", 0, world.size, True, wait_for_workers=False)
        if world.rank == 0
        else None
    )
    port = world.bcast(store.port if store else None)
    store = store or dist.TCPStore("127.0.0.1", port, world.size, False, timeout=TIMEOUT)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", store=store, rank=world.rank, world_size=world.size, timeout=TIMEOUT
    )


@cache
def communicator():
    from lightning_ring.comm.waiting import WaitPolicy

    if os.environ.get("RING_CHECK_BACKEND", "gloo") == "mpi":
        from lightning_ring.comm.backends.mpi import MPICommunicator

        return MPICommunicator(policy=WaitPolicy(TIMEOUT))
    if os.environ.get("RING_CHECK_BACKEND") == "shared memory":
        from lightning_ring.comm.backends.shared_memory.communicator import open_shared_memory
        from tests.checks.comm import MPIBootstrap

        return open_shared_memory(MPIBootstrap(), WaitPolicy(TIMEOUT))
    from lightning_ring.comm.backends.gloo import open_torch_communicator

    open_gloo()
    return open_torch_communicator("gloo", WaitPolicy(TIMEOUT))
