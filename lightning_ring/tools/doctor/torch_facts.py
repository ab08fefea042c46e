"""Run as a program: facts about torch and the GPUs, as one line of JSON.

Every question may fail by itself; that torch cannot be imported, or brings the process down, the caller sees.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightning_ring.job.gpus import nccl_version


def facts() -> dict[str, Any]:
    questions: dict[str, Callable[[], Any]] = {
        "version": lambda: torch.__version__,
        "cuda": lambda: torch.version.cuda,
        "rocm": lambda: torch.version.hip,
        "threads": torch.get_num_threads,
        "gloo": lambda: dist.is_available() and dist.is_gloo_available(),
        "nccl": lambda: ".".join(map(str, nccl_version())) or None,
        "gpus": _gpus,
    }
    answers: dict[str, Any] = {}
    for name, question in questions.items():
        try:
            answers[name] = question()
        except Exception as error:
            answers[name] = None
            answers[f"{name} error"] = _first_line(error)
    return answers


def _gpus() -> list[dict[str, Any]]:
    """Each GPU, after it really computed something and, over NCCL, reduced it with itself."""
    if not (torch.version.cuda or torch.version.hip):
        return []
    torch.cuda.init()  # says why there is no CUDA, where device_count() says 0
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpu = {"name": properties.name, "memory": properties.total_memory, "error": ""}
        gpu["capability"] = f"{properties.major}.{properties.minor}"
        gpu["peers"] = [
            other
            for other in range(torch.cuda.device_count())
            if other != index and torch.cuda.can_device_access_peer(index, other)
        ]
        try:
            _compute(index)
        except Exception as error:
            gpu["error"] = _first_line(error)
        found.append(gpu)
    return found


def _compute(index: int) -> None:
    ones = torch.ones(1024, device=torch.device("cuda", index))
    if index == 0 and dist.is_available() and dist.is_nccl_available():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(ones)
        dist.destroy_process_group()
    if ones.sum().item() != 1024:
        raise RuntimeError("a sum of 1,024 ones came out wrong")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


if __name__ == "__main__":
    print(json.dumps(facts()))
