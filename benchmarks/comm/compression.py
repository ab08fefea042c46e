"""What compressors cost: encoding and decoding on one core.

    OMP_NUM_THREADS=1 python -m benchmarks.comm.compression

Speeds are gradients (4 bytes each) a second, the best of several rounds, on a tensor of --mb MB:
``encode`` is all that a rank does before it sends, with what it keeps for error feedback; ``whole``
also what it does to the average that has arrived. `benchmarks.gpu` tells by `code_speeds` how fast
a GPU codes a GiB of gradients.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.step.optim import ms_of
from lightning_ring.comm.communicator import Communicator, CompletedWork, ReduceOp, Work
from lightning_ring.gradients.compression import DGC, Compressor, Int8, OneBit, TernGrad, TopK
from lightning_ring.gradients.compression.between_nodes import messages
from lightning_ring.gradients.compression.blocks import shard_length
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
        times = zip(*times_to_encode(make(), num_bytes // 4, rounds), strict=True)
        encoding, whole = (num_bytes / min(each) / 1e9 for each in times)
        print(f"{name:24}{encoding:9.2f}{whole:9.2f}", flush=True)


def code_speeds(
    device: str, num_bytes: int, copy_gb_s: float, num_ranks: int = 4
) -> Iterator[dict[str, object]]:
    """GB/s of memory, read and written, at which a rank's whole bucket is coded, by code, and its
    share of ``copy_gb_s``, the bandwidth of a copy. ``num_bytes`` of gradients should be many times
    the GPU's cache.

    ``aligned`` are rows of messages as they are now; ``unaligned`` ones begin at any multiple of 4
    bytes, as they did, and so do the gradients. ``average`` decodes the messages of all ranks for
    one shard.
    """
    length = shard_length(num_bytes // 4, num_ranks)
    numel = length * num_ranks
    room = torch.randn(numel + 1, device=device)
    for name, code in {"int8": INT8, "onebit": SIGNS}.items():
        num_message_bytes = num_ranks * code.num_bytes(length)
        for rows, offset in {"aligned": 0, "unaligned": 1}.items():
            values = room[offset : offset + numel]
            sent = pad(messages(num_ranks, code.num_bytes(length), values), (0, 4 * offset))
            own = values[:length]
            calls: dict[str, tuple[Callable[[], None], int]] = {
                "encode": (partial(code.encode, values, sent), 4 * numel),
                "decode": (partial(code.decode, sent, values), 4 * numel),
                "average": (partial(code.average, sent, own), 4 * length),
            }
            told: dict[str, object] = {"code": name, "rows": rows, "ranks": num_ranks}
            for way, (call, num_value_bytes) in calls.items():
                call()  # compiles its kernel
                speed = (num_value_bytes + num_message_bytes) / ms_of(call, device, 20) / 1e6
                told[f"{way}_gb_s"] = round(speed, 1)
                told[f"{way}_of_copy"] = round(speed / copy_gb_s, 3)
            yield told


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=16.0, help="of gradients, in 10^6 bytes")
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    speeds(int(asked.mb * 1e6), asked.rounds)


if __name__ == "__main__":
    main()
