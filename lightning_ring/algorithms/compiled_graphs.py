"""Compiled models: one graph a bucket, so that buckets leave while backward runs.

The backward of a compiled graph is one node of autograd, whose gradients all come at its end.
torch's compiler splits graphs at bucket boundaries for DistributedDataParallel
(`torch._dynamo.backends.distributed.DDPOptimizer`), where it finds an active module with
``bucket_bytes_cap``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch.nn.parallel import DistributedDataParallel

from lightning_ring.comm.cost import FIRST_BUCKET_MB

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class _Buckets:
    """All that the compiler reads of a DistributedDataParallel."""

    bucket_bytes_cap: int


@contextmanager
def split_at_buckets(cap_mb: float) -> Iterator[None]:
    """Graphs compiled inside are split at buckets of ``cap_mb`` MiB.

    ``torch._dynamo.config.optimize_ddp = False`` turns that off. The compiler takes no cap below
    its first bucket's, which is 1 MiB, as here.
    """
    buckets = _Buckets(int(max(cap_mb, FIRST_BUCKET_MB) * _MIB))
    DistributedDataParallel._active_ddp_module = cast(Any, buckets)
    try:
        yield
    finally:
        # not what was there before: that may be another thread's
        DistributedDataParallel._active_ddp_module = None
