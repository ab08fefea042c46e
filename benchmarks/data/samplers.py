"""How long samplers of 20 million entries take to start and to resume, and how much memory that
takes.

    python -m benchmarks.data.samplers

Each runs in a process of its own. Memory is how far the largest resident size grows beyond that of
imports and labels, until samples are drawn.
"""

import itertools
import multiprocessing
import resource
import time

import numpy as np

from benchmarks.turns import parser_of
from lightning_ring.data import BalancedSampler, PKSampler, ShuffledSampler

ENTRIES, CLASSES, DRAWN = 20_000_000, 50_000, 100_000


def samplers(labels):
    return {
        "shuffled": lambda: ShuffledSampler(len(labels), rank=0, world_size=1),
        "balanced": lambda: BalancedSampler(labels, rank=0, world_size=1),
        "square root": lambda: BalancedSampler(labels, beta=0.5, rank=0, world_size=1),
        "P x K": lambda: PKSampler(labels, 16, 4, rank=0, world_size=1),
    }


def resident_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(name):
    generator = np.random.default_rng(0)
    labels = np.empty(ENTRIES, dtype=np.int32)
    # in pieces: a large temporary would hide the samplers' memory
    for start in range(0, ENTRIES, 1 << 20):
        part = labels[start : start + (1 << 20)]
        # some classes are far larger
        part[:] = (CLASSES * generator.random(len(part)) ** 2).astype(np.int32)
    before = resident_mib()
    began = time.perf_counter()
    sampler = samplers(labels)[name]()
    order = iter(sampler)
    next(order)
    started = time.perf_counter() - began
    began = time.perf_counter()
    for _ in itertools.islice(order, DRAWN):
        pass
    each = (time.perf_counter() - began) / DRAWN
    grown = resident_mib() - before
    sampler.load_state_dict(sampler.state_dict(len(sampler) // 64 * 48))
    began = time.perf_counter()
    next(iter(sampler))
    resumed = time.perf_counter() - began
    found = f"{started:.2f} s | {grown:.0f} MiB | {each * 1e6:.1f} µs | {resumed:.2f} s"
    print(f"| {name} | {found} |", flush=True)


def main():
    parser_of(__doc__).parse_args()
    print(f"{ENTRIES:,} entries, {CLASSES:,} classes")
    print("| sampler | to the first sample | memory | a sample | to resume at 3/4 of the epoch |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    for name in samplers(np.zeros(1, dtype=np.int64)):
        process = multiprocessing.get_context("spawn").Process(target=measure, args=(name,))
        process.start()
        process.join()
        assert process.exitcode == 0


if __name__ == "__main__":
    main()
