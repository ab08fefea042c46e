"""What an all-reduce between two cores can reach: each adds half of what the other just wrote, and
writes it back.

    python -m benchmarks.comm.cores

Two processes share memory. Between the timed parts each writes its whole buffer, as backward does,
so that the lines lie in its core's cache. An all-reduce has to fetch half of the other's buffer
from there and to put half of its own there; nothing else is timed: no agreement, no waiting, no
interpreter around it. Needs Linux or macOS.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time

import torch

SIZES = [64 * 2**10, 256 * 2**10, 2**20, 4 * 2**20, 25 * 2**20, 100 * 2**20]
ROUNDS = 40


def main() -> None:
    torch.set_num_threads(1)
    longest = max(SIZES)
    memory = mmap.mmap(-1, 4096 + 2 * longest)
    arrived = memoryview(memory)[:128].cast("q")
    buffers = [
        torch.frombuffer(
            memory, dtype=torch.float32, offset=4096 + rank * longest, count=longest // 4
        )
        for rank in range(2)
    ]
    child = os.fork()
    rank = 0 if child else 1

    def meet() -> None:
        arrived[8 * rank] += 1
        while arrived[8 * (1 - rank)] < arrived[8 * rank]:
            pass

    if rank == 0:
        print(
            "| size | add half of the other's | write half to the other's | all-reduce at most "
            "|\n|---|---|---|---|"
        )
    for size in SIZES:
        added, written = [], []
        half = slice(rank * size // 8, (rank + 1) * size // 8)
        mine, theirs = buffers[rank][: size // 4], buffers[1 - rank][: size // 4]
        for number in range(ROUNDS):
            mine.fill_(float(number))
            meet()
            begin = time.perf_counter()
            mine[half].add_(theirs[half])
            between = time.perf_counter()
            theirs[half].copy_(mine[half])
            end = time.perf_counter()
            added.append(between - begin)
            written.append(end - between)
            meet()
        if rank == 0:
            add, write = statistics.median(added), statistics.median(written)
            speed = size / (add + write) / 1e9
            print(
                f"| {size / 2**10:.0f} KiB | {1e6 * add:.1f} µs | {1e6 * write:.1f} µs | "
                f"{speed:.1f} GB/s |",
                flush=True,
            )
    if child:
        os.waitpid(child, 0)
    else:
        os._exit(0)


if __name__ == "__main__":
    main()
