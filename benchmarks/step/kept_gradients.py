"""What the reducer asks at every bucket costs, and what copies cost where somebody keeps a
gradient. One process.

    OMP_NUM_THREADS=1 python -m benchmarks.step.kept_gradients

161 parameters with the sizes of a ResNet-50's, on one thread; processor time, the least of 20 steps
each.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn import Parameter

from lightning_ring.comm.cost import DEFAULT_CAP_MB
from lightning_ring.gradients.bucket import plan_buckets


def sizes() -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            found += [
                (width, inputs, 1, 1),
                (width,),
                (width,),
                (width, width, 3, 3),
                (width,),
                (width,),
            ]
            found += [(4 * width, width, 1, 1), (4 * width,), (4 * width,)]
            if block == 0:
                found += [(4 * width, inputs, 1, 1), (4 * width,), (4 * width,)]
            inputs = 4 * width
    return [*found, (1000, 2048), (1000,)]


def fastest(run: Callable[[], object], repeats: int = 20) -> float:
    """Microseconds of the processor."""
    run()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        run()
        times.append(time.process_time() - began)
    return 1e6 * min(times)


def main() -> None:
    params = [(f"p{i}", Parameter(torch.zeros(size))) for i, size in enumerate(sizes())]
    buckets = plan_buckets(params[::-1], DEFAULT_CAP_MB)
    fresh = [[True] * len(bucket.params) for bucket in buckets]
    grads = [torch.ones_like(param) for _, param in params]

    def step() -> None:
        for (_, param), grad in zip(params, grads, strict=True):
            param.grad = grad
        for bucket, contributed in zip(buckets, fresh, strict=True):
            bucket.fill(contributed, stop=False)
        for bucket in buckets:
            bucket.publish()

    step()
    held = fastest(lambda: [bucket._lent.are_held() for bucket in buckets])  # type: ignore[union-attr]
    names = fastest(
        lambda: [
            f"backward {i} (step {i}): bucket {i} ({b.describe()})" for i, b in enumerate(buckets)
        ]
    )
    views = fastest(step)
    kept = [param.grad for _, param in params]
    step()
    del kept
    copies = fastest(step)
    mib = sum(param.nbytes for _, param in params) / 2**20
    print(f"{len(params)} parameters, {mib:.0f} MiB, {len(buckets)} buckets; µs a step:")
    print(f"  does somebody hold a bucket: {held:.0f}; names of collectives: {names:.0f}")
    print(f"  fill and publish, views: {views:.0f}; copies: {copies:.0f}")


if __name__ == "__main__":
    main()
