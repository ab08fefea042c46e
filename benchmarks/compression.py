"""What compressors cost: encoding and decoding on one core, and the bytes that leave a host's
network interface.

    OMP_NUM_THREADS=1 python -m benchmarks.compression    # encoding and decoding, one process
    python -m benchmarks.compression --hosts 4            # bytes, one rank on each of 4 hosts

Speeds are gradients (4 bytes each) a second, the best of several rounds, on a tensor of --mb MB:
``encode`` is all that a rank does before it sends, with what it keeps for error feedback;
``decode`` what it does to the average that has arrived. Bytes need Linux, root, ip and tc
(`benchmarks.hosts`): they are the growth of ``tx_bytes`` of a host's interface, headers of TCP
included, against that of an all-reduce in float32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import torch

from benchmarks.wire_bytes import passed_by_all, run_on_hosts
from lightning_ring.comm.communicator import ReduceOp
from lightning_ring.gradients.compression import DGC, Compressor, Int8, OneBit, TernGrad, TopK
from lightning_ring.gradients.compression.int8 import INT8
from lightning_ring.gradients.compression.one_bit import SIGNS
from lightning_ring.host.malloc import keep_freed_memory
from lightning_ring.tools.plan.probing import OneGradient, times_to_encode

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


def bytes_that_leave(num_bytes: int) -> None:
    """What every rank runs."""
    from lightning_ring.job.communicators import open_communicator
    from lightning_ring.job.job import connect
    from lightning_ring.job.ranks import discover_ranks

    torch.set_num_threads(1)
    info, limit, cpu = discover_ranks(), timedelta(seconds=60), torch.device("cpu")
    comm = open_communicator(connect(info, cpu, limit), "gloo", cpu, limit, limit, "flat")
    counts: dict[str, int] = {}
    for name, make in {"none": None, "bf16": None, **WAYS}.items():
        dtype = torch.bfloat16 if name == "bf16" else torch.float32
        flat = torch.randn(num_bytes // 4, generator=torch.Generator().manual_seed(info.rank)).to(
            dtype
        )
        before, _ = passed_by_all(comm)
        if make is None:
            comm.all_reduce_(flat, op=ReduceOp.AVG).wait()
        else:
            compressor = make()
            compressor.prepare(flat, OneGradient(flat))
            compressor.begin_backward()
            compressor.all_reduce(flat, comm, name="bucket").wait()
        after, _ = passed_by_all(comm)
        counts[name] = after - before
    if info.rank == 0:
        print(
            f"bytes that leave a host's interface, {info.world_size} hosts, {num_bytes / 1e6:g} "
            "MB of float32"
        )
        for name, count in counts.items():
            print(f"{name:24}{count:14,}{count / counts['none']:9.4f}", flush=True)
    comm.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mb", type=float, default=16.0, help="size of the gradients, in units of 10^6 bytes"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--hosts", type=int, nargs="+", default=[], help="count bytes, between so many hosts"
    )
    parser.add_argument("--in-rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.in_rank:
        bytes_that_leave(int(asked.mb * 1e6))
        return 0
    if not asked.hosts:
        speeds(int(asked.mb * 1e6), asked.rounds)
        return 0
    return run_on_hosts("benchmarks.compression", asked.hosts, "--in-rank", "--mb", str(asked.mb))


if __name__ == "__main__":
    sys.exit(main())
