"""All ranks that several jobs have on one host, forked from one process that has imported Lightning
once.

``python -m benchmarks.step.forked PLAN HOST``: PLAN is JSON, as `plan` makes it. A rank finds its
place in torchrun's variables, which Lightning's DDP and lightning_ring both read. Forking saves
each rank the import, which takes longer than what is measured; nothing of torch's threads, MPI or
CUDA has started by then.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from lightning_ring.job.rendezvous.greeting import reserve_port

# until the process that planned ends, the ports of its jobs are given to nobody
_RESERVED: list[socket.socket] = []


def plan(
    contenders: Sequence[str], arguments: Sequence[str], ranks: int, addresses: Sequence[str]
) -> str:
    """
    Args:
        contenders: One job each.
        arguments: Of `step_rank`, without the contender.
        ranks: In each job, round-robin over the hosts.
        addresses: Of the hosts; rank 0 is on the first.
    """
    reserved = {name: reserve_port() for name in contenders}
    _RESERVED.extend(reserved.values())
    jobs = {name: one.getsockname()[1] for name, one in reserved.items()}
    places = {"ranks": ranks, "hosts": len(addresses), "master": addresses[0]}
    return json.dumps({"jobs": jobs, "arguments": [*arguments]} | places)


def place(job: dict[str, Any], name: str, rank: int) -> dict[str, str]:
    """torchrun's variables of one rank."""
    node, local_rank = rank % job["hosts"], rank // job["hosts"]
    return {
        "TORCHELASTIC_RUN_ID": name,
        "RANK": str(rank),
        "WORLD_SIZE": str(job["ranks"]),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(len(range(node, job["ranks"], job["hosts"]))),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(job["hosts"]),
        "MASTER_ADDR": job["master"],
        "MASTER_PORT": str(job["jobs"][name]),
    }


def main() -> int:
    job, host = json.loads(sys.argv[1]), int(sys.argv[2])
    # deferred: `plan` is called by a process that needs none of this
    from benchmarks.step import rank as step_rank

    pids = set()
    for name in job["jobs"]:
        for rank in range(host, job["ranks"], job["hosts"]):
            pid = os.fork()
            if pid == 0:
                if job["ranks"] > 1:
                    os.environ.update(place(job, name, rank))
                step_rank.main([*job["arguments"], name])
                sys.exit(0)
            pids.add(pid)
    code = 0
    while pids:
        pid, status = os.wait()
        pids.discard(pid)
        if status and not code:
            code = 1
            for other in pids:
                os.kill(other, signal.SIGTERM)
    return code


if __name__ == "__main__":
    sys.exit(main())
