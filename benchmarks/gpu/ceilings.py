"""What this GPU and its software are, and how fast it copies."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform

import torch
import torch.distributed as dist

from benchmarks.step import optim


def nccl() -> dict[str, object]:
    """What NCCL says of this card, and that it sums."""
    device = torch.device("cuda", 0)
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    backend = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
    ones = torch.ones(4, device=device)
    dist.all_reduce(ones)
    found = {
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "supports_tensor_alloc": getattr(backend, "supports_tensor_alloc", lambda _: None)(device),
        "sums": ones.tolist(),
    }
    dist.destroy_process_group()
    return found


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "lightning", "torchvision", "timm", "numpy", "mpi4py"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    print(json.dumps(versions() | {"cores": os.cpu_count()}), flush=True)
    if asked.device == "cuda":
        card = torch.cuda.get_device_properties(0)
        facts = {
            "card": card.name,
            "memory_gib": round(card.total_memory / 2**30, 1),
            "processors": card.multi_processor_count,
            "copy_gb_s": round(optim.copy_bandwidth()),
        }
        print(json.dumps(facts), flush=True)
        print(json.dumps(nccl()), flush=True)


if __name__ == "__main__":
    main()
