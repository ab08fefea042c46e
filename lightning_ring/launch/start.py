"""Starts the ranks of a job, through mpirun or as plain processes of this host, and supervises
them.
"""

from __future__ import annotations

import secrets
import shlex
import signal
from collections.abc import Mapping, Sequence

from lightning_ring.elastic.membership import counted_ranks
from lightning_ring.job.exit import say
from lightning_ring.job.rendezvous.door import SECRET
from lightning_ring.job.rendezvous.greeting import LOOPBACK, reserve_port
from lightning_ring.launch.child import Child
from lightning_ring.launch.hosts import Host
from lightning_ring.launch.mpirun import Mpirun, mpirun_line, rank_environment
from lightning_ring.launch.supervisor import STOP_SIGNAL, Supervisor, stop_grace


def ranks_of(ranks: int, command: Sequence[str]) -> str:
    return f"{counted_ranks(ranks)} of: {shlex.join(command)}"


def mpirun_job(
    mpirun: Mpirun,
    ranks: int,
    command: Sequence[str],
    hosts: Sequence[Host],
    environ: Mapping[str, str],
) -> Supervisor:
    """A job of one mpirun, not yet started; its line goes to standard error."""
    # Hydra passes SIGTERM on to the ranks, as often as it comes, and SIGUSR2 ends it
    passes_usr2 = mpirun.family == "openmpi"
    stop_signal = STOP_SIGNAL if passes_usr2 else signal.SIGTERM
    dies_with_parent = signal.SIGTERM if passes_usr2 else signal.SIGKILL
    rank_environ = rank_environment(ranks, hosts, environ, stop_signal)
    line = mpirun_line(mpirun, ranks, command, hosts, rank_environ)
    say(shlex.join(line))
    child = Child("mpirun", line, rank_environ, dies_with_parent=dies_with_parent)
    return Supervisor([child], grace=stop_grace(environ), stop_signal=stop_signal)


def plain_job(ranks: int, command: Sequence[str], environ: Mapping[str, str]) -> Supervisor:
    """A job of ``ranks`` plain processes on this host, not yet started.

    The port at which rank 0 will listen is reserved as long as the job runs.
    """
    reserved = reserve_port()
    common = rank_environment(ranks, [], environ, STOP_SIGNAL) | {
        "RING_WORLD_SIZE": str(ranks),
        "RING_STORE": f"{LOOPBACK}:{reserved.getsockname()[1]}",
        SECRET: secrets.token_hex(16),
    }
    children = [
        Child(f"rank {rank}", command, common | {"RING_RANK": str(rank)}) for rank in range(ranks)
    ]
    say(ranks_of(ranks, command))
    return Supervisor(children, grace=stop_grace(environ), holds=reserved)
