"""Times all-reduce between hosts against plain torch.distributed over Gloo, and prints ratios and
the wire's share.

    python -m benchmarks.comm.network  # 4 ranks on 2 hosts and 2 on 2, at 1 Gbit/s each way

needs Linux, root, ip and tc: the hosts are network namespaces (`benchmarks.hosts`). All ways take
    turns, round after
round, in one launch; a time is that of the slowest rank, and a ratio the median over rounds of the
ratio in a round.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.hosts import open_hosts, why_not

_BITS = {"gbit": 1e9, "mbit": 1e6}
_TIMEOUT = timedelta(seconds=60)


def bytes_per_second(rate: str) -> float:
    """``"1gbit"``, as tc writes it."""
    return next(
        float(rate[: -len(unit)]) * bits / 8 for unit, bits in _BITS.items() if rate.endswith(unit)
    )


def compare(num_bytes: int, rounds: int, rate: str, backends: list[str]) -> None:
    """What every rank runs."""
    from lightning_ring.job.communicators import open_communicator
    from lightning_ring.job.job import connect
    from lightning_ring.job.ranks import discover_ranks

    torch.set_num_threads(1)
    info = discover_ranks()
    job = connect(info, torch.device("cpu"), _TIMEOUT)
    buffers: dict[str, Tensor] = {"torch": torch.ones(num_bytes // 4)}
    ways: dict[str, Callable[[], object]] = {"torch": lambda: dist.all_reduce(buffers["torch"])}
    opened = []
    for name in backends:
        backend, _, topology = name.partition("/")
        comm = open_communicator(
            job, backend, torch.device("cpu"), _TIMEOUT, _TIMEOUT, topology or "auto"
        )
        job.communicator = None  # stays open beside the next one
        opened.append(comm)
        buffers[name] = comm.empty(num_bytes // 4, torch.float32, torch.device("cpu")).fill_(1)
        ways[name] = lambda comm=comm, flat=buffers[name]: comm.all_reduce_(flat).wait()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(rounds + 1):
        for name, way in ways.items():
            dist.barrier()
            began = time.perf_counter()
            way()
            took = torch.tensor([time.perf_counter() - began])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if round_number:  # the first one connects, and touches memory
                times[name].append(float(took))
            buffers[name].fill_(1)
    if info.rank == 0:
        report(times, num_bytes, info.world_size, info.num_nodes, rate)
    for comm in opened:
        comm.close()


def report(
    times: dict[str, list[float]], num_bytes: int, world_size: int, num_hosts: int, rate: str
) -> None:
    # what a host must send, and receive: all it can do is put every byte on the wire once
    least = 2 * (num_hosts - 1) / num_hosts * num_bytes / bytes_per_second(rate)
    print(
        f"\nall-reduce of {num_bytes / 1e6:g} MB, {world_size} ranks on {num_hosts} hosts at {rate}"
    )
    print(f"{'':24}{'median ms':>12}{'times faster':>14}{'of the wire':>13}")
    for name, seconds in times.items():
        ratio = statistics.median(
            base / own for base, own in zip(times["torch"], seconds, strict=True)
        )
        median = statistics.median(seconds)
        print(f"{name:24}{median * 1e3:12.2f}{ratio:14.2f}{least / median:12.0%}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mb", type=float, nargs="+", default=[20.0], help="sizes, in units of 10^6 bytes"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 2])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--ways", nargs="+", default=["auto"], help="BACKEND or BACKEND/TOPOLOGY, such as gloo/flat"
    )
    parser.add_argument("--in-rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.in_rank:
        for size in asked.mb:
            compare(int(size * 1e6), asked.rounds, asked.rate, asked.ways)
        return 0
    reason = why_not()
    if reason is not None:
        print(f"skipped: {reason}", file=sys.stderr)
        return 77
    with open_hosts(asked.hosts, asked.rate) as hosts:
        for ranks in asked.ranks:
            rank = [sys.executable, "-m", "benchmarks.comm.network", "--in-rank", *sys.argv[1:]]
            done = subprocess.run(hosts.mpirun(ranks, *rank))
            if done.returncode:
                return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
