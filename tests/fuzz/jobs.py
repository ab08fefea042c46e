"""The jobs that run programs: the ranks of one strategy, which stay from program to program.

Ranks are forked from one server that has imported torch and Lightning, so that a job that hung or
crashed is replaced in a fraction of a second. Every wait is bounded, and ranks end with the process
that started them.
"""

import multiprocessing
import os
import pickle
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from lightning_ring.job.rendezvous.greeting import reserve_port

# s for other ranks to raise too; else 2
AFTER_AN_ERROR = dict.fromkeys(("ring", "ring_sharded", "horovod"), 35.0)


@dataclass(frozen=True)
class Order:
    """``script``: path of a program. ``save``: path of a checkpoint to write after the first epoch.
    ``load``: path of one to go on from. ``folder``: for the checkpoint of the end."""

    script: str
    folder: str
    save: str | None = None
    load: str | None = None


@dataclass
class Outcome:
    """How a program ended under one strategy. ``kind``: ``"ok"``, ``"error"``, ``"hang"`` or
    ``"crash"``.
    """

    kind: str
    ranks: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    # of a run without the resuming that `ranks` had
    straight: list[dict[str, Any]] = field(default_factory=list)

    @property
    def errors(self):
        return [rank for rank in self.ranks if "error" in rank]


class Job:
    def __init__(self, strategy, ranks, folder, limit):
        self.strategy = strategy
        self._ranks = ranks
        self._limit = limit
        self._output = folder / f"{strategy}-{ranks}.output"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            [
                "tests.fuzz.rank",
                "lightning",
                "torchmetrics",
                "lightning_ring.integrations.lightning.strategy",
            ]
        )
        self._processes = []
        self._orders = []
        self._reserved = None  # holds the port at which the ranks meet

    def run(self, order):
        if not self._processes:
            self._start()
        begin = self._output.stat().st_size if self._output.exists() else 0
        for orders in self._orders:
            orders.send(order)
        results = self._wait()
        missing = [rank for rank in range(self._ranks) if rank not in results]
        dead = [rank for rank in missing if not self._processes[rank].is_alive()]
        ranks = [results[rank] for rank in sorted(results)]
        failed = [result for result in ranks if "error" in result]
        text = "\n".join(result["traceback"] for result in failed)
        kind = "error" if failed else "ok"
        if missing and not (failed and self.strategy == "ddp"):
            kind = "crash" if dead else "hang"
            text += f"no result from ranks {missing}, ended: {dead}\n"
        if missing or failed:
            time.sleep(0.3 if missing else 0)
            text += self._output.read_bytes()[begin:].decode(errors="replace")[-6000:]
            self.end()
        return Outcome(kind, ranks, text)

    def _wait(self):
        """Results by rank; ends at the limit, when a rank died, or some time after one failed."""
        results = {}
        deadline = time.monotonic() + self._limit
        while len(results) < self._ranks and (left := deadline - time.monotonic()) > 0:
            pending = {
                orders: rank for rank, orders in enumerate(self._orders) if rank not in results
            }
            for orders in wait(list(pending), left):
                assert isinstance(orders, Connection)
                try:
                    result = pickle.loads(orders.recv_bytes())
                except (EOFError, ConnectionError):
                    self._processes[pending[orders]].join(1)
                    return results
                results[pending[orders]] = result
                if "error" in result:
                    deadline = min(
                        deadline, time.monotonic() + AFTER_AN_ERROR.get(self.strategy, 2.0)
                    )
        return results

    def _start(self):
        self._reserved = reserve_port()
        for rank in range(self._ranks):
            env = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self._ranks),
                "LOCAL_WORLD_SIZE": str(self._ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._reserved.getsockname()[1]),
                "TORCHELASTIC_RUN_ID": "fuzz",
                "GLOO_SOCKET_IFNAME": "lo",
            }
            ours, theirs = multiprocessing.Pipe()
            arguments = (theirs, self.strategy, env, str(self._output), self._limit - 2)
            process = self._context.Process(target=_follow_orders, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._orders.append(ours)

    def end(self):
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(5)
        for orders in self._orders:
            orders.close()
        if self._reserved is not None:
            self._reserved.close()
        self._processes, self._orders, self._reserved = [], [], None


def _follow_orders(*arguments):
    from tests.fuzz.rank import follow_orders  # here: torch is for the ranks alone

    follow_orders(*arguments)


def one_thread_each():
    """For the server that ranks are forked from, and before it starts."""
    os.environ["OMP_NUM_THREADS"] = "1"
