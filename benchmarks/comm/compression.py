"""What compressors cost: encoding and decoding on one core.

    OMP_NUM_THREADS=1 python -m benchmarks.comm.compression

Speeds are gradients (4 bytes each) a second, the best of several rounds, on a tensor of --mb MB:
``encode`` is all that a rank does before it sends, with what it keeps for error feedback; ``whole``
also what it does to the average that has arrived.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_ring.comm.communicator import Communicator, CompletedWork, ReduceOp, Work
from lightning_ring.gradients.compression import DGC, Compressor, Int8, OneBit, TernGrad, TopK
from lightning_ring.gradients.compression.int8 import INT8
from lightning_ring.gradients.compression.one_bit import SIGNS
from lightning_ring.host.malloc import keep_freed_memory

WAYS: dict[str, Callable[[], Compressor]] = {
    "int8": Int8,
    "onebit": OneBit,
    "terngrad": TernGrad,
    "topk": TopK,
    "dgc": partial(DGC, warmup_steps=0),
}


_ROWS = 1024  # of the matrices that gradients are cut into


def times_to_encode(compressor: Compressor, numel: int, rounds: int) -> list[tuple[float, float]]:
    """Seconds until ``numel`` gradients have been encoded for sending, and until their average is
    there, by round.

    Of one of two ranks, whose messages take no time. With error feedback, if any; without the copy
    into a bucket, which is all that 16 bits take.
    """
    comm = SilentCommunicator(2)
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    flat = gradient.to(compressor.buffer_dtype or gradient.dtype)
    if compressor.buffer_dtype is None:
        compressor.prepare(flat, OneGradient(flat))
    times = []
    for _ in range(rounds):
        flat.copy_(gradient)
        compressor.begin_backward()
        comm.sent.clear()
        began = time.perf_counter()
        compressor.all_reduce(flat, comm, name="bucket").wait()
        whole = time.perf_counter() - began
        # TernGrad's scalers travel before
        times.append((comm.sent[-2 if len(comm.sent) > 1 else 0] - began, whole))
    return times


class OneGradient:
    """Of ``flat`` as square matrices, as far as it goes."""

    def __init__(self, flat: Tensor) -> None:
        self.views = [
            part.view(-1, _ROWS) if part.numel() % _ROWS == 0 else part
            for part in flat.split(_ROWS * _ROWS)
        ]
        self.names = [str(index) for index in range(len(self.views))]
        self.contributed = [True] * len(self.views)
        self.used = torch.ones(len(self.views))


class SilentCommunicator(Communicator):
    """One of ``world_size`` ranks, whose collectives take no time and bring nothing new.

    Attributes:
        sent: When each of them was called, by `time.perf_counter`.
    """

    def __init__(self, world_size: int) -> None:
        self.rank, self.world_size = 0, world_size
        self.sent: list[float] = []

    def _called(self) -> Work:
        self.sent.append(time.perf_counter())
        return CompletedWork()

    def all_reduce_(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        return self._called()

    def reduce_scatter_(self, flat: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        return self._called()

    def all_gather_(self, flat: Tensor, *, name: str = "") -> Work:
        work = self._called()
        rows = flat.view(self.world_size, -1)
        rows[1:].copy_(rows[:1].expand_as(rows[1:]))
        return work

    def all_to_all(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, name: str = ""
    ) -> Work:
        work = self._called()
        for source, target in zip(inputs, outputs, strict=True):
            target.copy_(source)
        return work

    def broadcast_(self, tensor: Tensor, *, src: int = 0, name: str = "") -> Work:
        return self._called()

    def close(self) -> None:
        return None


def speeds(num_bytes: int, rounds: int) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()  # as `RingStrategy` does by default
    print(f"{'gradients, GB/s a core':24}{'encode':>9}{'whole':>9}")
    for name, make in WAYS.items():
        encoding, whole = map(
            min, zip(*times_to_encode(make(), num_bytes // 4, rounds), strict=True)
        )
        print(
            f"{name:24}{num_bytes / encoding / 1e9:9.2f}{num_bytes / whole / 1e9:9.2f}", flush=True
        )


def codes(device: str, num_bytes: int) -> Iterator[str]:
    """GB/s of gradients that the codes with Triton kernels take, whole and from memory."""
    from torch.utils.benchmark import Timer  # deferred: it says so where there is no CUDA

    values = torch.randn(num_bytes // 4, device=device)
    for name, code in {"int8": INT8, "onebit": SIGNS}.items():
        message = torch.empty(code.num_bytes(values.numel()), dtype=torch.uint8, device=device)
        given = {"code": code, "values": values, "message": message}
        calls = {"encode": "code.encode(values, message)", "decode": "code.decode(message, values)"}
        times = {
            call: Timer(line, globals=given).blocked_autorange().median
            for call, line in calls.items()
        }
        found = ", ".join(
            f"{call} {num_bytes / seconds / 1e9:.1f} GB/s" for call, seconds in times.items()
        )
        yield f"- compression={name!r}: {found}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mb", type=float, default=16.0, help="size of the gradients, in units of 10^6 bytes"
    )
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    speeds(int(asked.mb * 1e6), asked.rounds)


if __name__ == "__main__":
    main()
