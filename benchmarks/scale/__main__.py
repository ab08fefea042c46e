"""The control plane of a job with thousands of ranks, on this machine.

    python -m benchmarks.scale --ranks 64 512 4096

Rank 0's process, and the steward's, is as in a job: store, greeter, relay of the watch, stall
reports. The other ranks are objects of the package's classes in a few processes, with sockets of
their own over loopback; one thread of a process reads all of its connections. They open no process
group of torch.distributed. The last rank has a process of its own, which is killed.

Beside each time are bytes and messages of a rank: those that the connections of the server have
carried, in both directions, as the kernel counts them (a message is a TCP segment with data).
"""

import argparse
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.scale.elastic import Members, Serving
from benchmarks.scale.job import JobRanks
from benchmarks.scale.processes import Processes
from lightning_ring.job.rendezvous.greeting import reserve_port

AWAY = 3  # the rank that a collective waits for


class Run:
    """The first process has rank 0 or the steward, the last one a rank that will be killed."""

    def __init__(self, num_ranks: int, makes: Sequence[Callable[[], Any]], first: int = 0) -> None:
        self._num_ranks = num_ranks
        self._processes = Processes(makes)
        self._ranks = range(first, len(makes))
        self._facts: dict[str, float] = {}
        self._most = 0  # descriptors

    def order(self, name: str, *arguments: Any, only: Sequence[int] | None = None) -> list[Any]:
        ranks = self._ranks if only is None else only
        return self._processes.order(name, *arguments, only=ranks)

    def time(self, title: str, name: str, *arguments: Any) -> None:
        began = time.monotonic()
        self._show(title, max(self.order(name, *arguments)) - began)

    def kill(self, title: str) -> None:
        died = self._processes.kill(-1)
        self._show(title, max(when for part in self.order("deaths") for when in part) - died)

    def close(self) -> None:
        facts = self._facts
        size = f"{facts['resident']:.0f} MiB, {self._most} descriptors more"
        print(f"{'':20} its server: {size} than before", flush=True)
        self._processes.close()

    def _show(self, title: str, seconds: float) -> None:
        before = self._facts
        (self._facts,) = self.order("facts", only=[0])
        moved = {
            name: (self._facts[name] - before.get(name, 0)) / self._num_ranks
            for name in ("bytes", "messages")
        }
        shown = f"{moved['bytes']:8.0f} bytes, {moved['messages']:5.1f} messages a rank"
        self._most = max(self._most, int(self._facts["descriptors"]))
        # connections that have ended are not counted any more
        shown = shown if moved["bytes"] > 0 else ""
        print(f"{title:20} {seconds:7.2f} s {shown}", flush=True)


def rank_processes(
    kind: Callable[..., Any], num_ranks: int, processes: int
) -> list[Callable[[], Any]]:
    others = range(1, num_ranks - 1)
    parts = [[0], *(others[part::processes] for part in range(processes)), [num_ranks - 1]]
    return [functools.partial(kind, part, num_ranks) for part in parts if part]


def run_job(num_ranks: int, processes: int, *, dies: bool) -> None:
    with reserve_port() as reserved:
        os.environ["MASTER_PORT"] = str(reserved.getsockname()[1])
        run = Run(num_ranks, rank_processes(JobRanks, num_ranks, processes))
    run.time("start", "start")
    if dies:
        run.kill("a death")
        run.time("all others fail", "fail")
    else:
        run.time("next fit", "fit")
        run.time("a stall report", "stall", AWAY)
        run.time("all leave", "leave")
    run.close()


def run_elastic(num_ranks: int, processes: int) -> None:
    makes = [functools.partial(Serving, num_ranks), *rank_processes(Members, num_ranks, processes)]
    run = Run(num_ranks, makes, first=1)
    run.time("elastic: connect", "open", *run.order("variables", only=[0]))
    run.time("first view", "enter")
    run.kill("a death")
    run.time("next view", "enter")
    run.time("all finish", "finish")
    run.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--processes", type=int, default=4)
    asked = parser.parse_args()
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    # torch asks the DNS for the names of peers; where none answers, 10 s of a start are its wait
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    for num_ranks in asked.ranks:
        print(f"{num_ranks} ranks in {asked.processes} processes", flush=True)
        run_job(num_ranks, asked.processes, dies=False)
        run_job(num_ranks, asked.processes, dies=True)
        run_elastic(num_ranks, asked.processes)


if __name__ == "__main__":
    main()
