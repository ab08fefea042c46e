"""Run as a program: facts about torch and the GPUs, as one line of JSON.

Every question may fail by itself; that torch cannot be imported, or brings the process down, the
caller sees.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightning_ring.host.accelerator import COLLECTIVES, gpu_kind, gpu_module, vendor


def facts() -> dict[str, Any]:
    questions: dict[str, Callable[[], Any]] = {
        "version": lambda: torch.__version__,
        "build": _build,
        "gloo": lambda: dist.is_available() and dist.is_gloo_available(),
        "collectives": _collectives,
        "gpus": _gpus,
    }
    answers: dict[str, Any] = {}
    for name, question in questions.items():
        try:
            answers[name] = question()
        except Exception as error:
            answers |= {name: None, f"{name} error": _first_line(error)}
    return answers


def _build() -> str:
    """What GPUs this torch is for."""
    for kind, name in (("cuda", "CUDA"), ("hip", "ROCm"), ("xpu", "XPU")):
        if version := getattr(torch.version, kind, None):
            return f"{name} {version}"
    return "the CPU"


def _gpus() -> list[dict[str, Any]]:
    """Each GPU, after it really computed something and, over its vendor's library, reduced it
    with itself.
    """
    kind = gpu_kind() or ("cuda" if torch.version.cuda or torch.version.hip else "")
    if not kind:
        return []
    module = gpu_module(torch.device(kind))
    module.init()  # says why there is none, where device_count() says 0
    found = []
    for index in range(module.device_count()):
        properties = module.get_device_properties(index)
        name, memory = f"{vendor(kind)} {properties.name}", properties.total_memory
        gpu = {"name": name, "memory": memory, "error": ""}
        try:
            _compute(torch.device(kind, index))
        except Exception as error:
            gpu["error"] = _first_line(error)
        found.append(gpu)
    return found


def _collectives() -> str:
    """The library that GPUs exchange tensors over, and its version; empty without one."""
    if dist.is_xccl_available():
        return "XCCL"
    if not dist.is_nccl_available():
        return ""
    name = "RCCL" if torch.version.hip else "NCCL"
    return f"{name} {'.'.join(map(str, torch.cuda.nccl.version()))}"


def _compute(device: torch.device) -> None:
    ones = torch.ones(1024, device=device)
    library = COLLECTIVES[device.type]
    if device.index == 0 and dist.is_available() and dist.is_backend_available(library):
        dist.init_process_group(library, store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(ones)
        dist.destroy_process_group()
    if ones.sum().item() != 1024:
        raise RuntimeError("a sum of 1,024 ones came out wrong")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


if __name__ == "__main__":
    print(json.dumps(facts()))
