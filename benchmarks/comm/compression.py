"""What compressors cost: encoding and decoding on one core.

    OMP_NUM_THREADS=1 python -m benchmarks.comm.compression

Speeds are gradients (4 bytes each) a second, the best of several rounds, on a tensor of --mb MB:
``encode`` is all that a rank does before it sends, with what it keeps for error feedback; ``whole``
also what it does to the average that has arrived.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from lightning_ring.tools.plan.probing import times_to_encode

from lightning_ring.gradients.compression import DGC, Compressor, Int8, OneBit, TernGrad, TopK
from lightning_ring.gradients.compression.int8 import BLOCKS
from lightning_ring.gradients.compression.one_bit import SIGNS
from lightning_ring.host.malloc import keep_freed_memory

WAYS: dict[str, Callable[[], Compressor]] = {
    "int8": Int8,
    "onebit": OneBit,
    "terngrad": TernGrad,
    "topk": TopK,
    "dgc": partial(DGC, warmup_steps=0),
}


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
    for name, code in {"int8": BLOCKS, "onebit": SIGNS}.items():
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
