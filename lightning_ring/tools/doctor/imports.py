"""Can torch, torchvision and Lightning be imported, and with which backends was torch built."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from lightning_ring.tools.doctor.asking import Answer, ask
from lightning_ring.tools.doctor.finding import Finding, broken, ok
from lightning_ring.tools.doctor.request import Request
from lightning_ring.tools.doctor.versions import version

_SECONDS = 60.0
_REST = """
import sys
for module in sys.argv[1:]:
    print(module, flush=True)
    __import__(module)
"""
_lock = threading.Lock()
_asked: dict[str, Any] = {}


def check(request: Request) -> list[Finding]:
    facts, answer = torch_facts(request)
    if not facts:
        return [
            broken("import torch", _why(answer), "pip install --force-reinstall torch torchvision (in one command).")
        ]
    return [ok("import torch", f"{facts['version']}, {_build(facts)}"), *_backends(facts), *_rest(request)]


def torch_facts(request: Request) -> tuple[dict[str, Any], Answer]:
    """What `torch_facts.py` says, empty where torch cannot be imported. Asked once, whoever comes first."""
    with _lock:
        if not _asked:
            command = [sys.executable, "-m", "lightning_ring.tools.doctor.torch_facts"]
            answer = ask(command, request.at_most(_SECONDS), request.child_environ)
            lines = answer.stdout.splitlines()
            known = json.loads(lines[-1]) if not answer.problem and lines else {}
            _asked["answer"] = (known, answer)
        facts: tuple[dict[str, Any], Answer] = _asked["answer"]
        return facts


def _build(facts: dict[str, Any]) -> str:
    cuda, rocm = facts.get("cuda"), facts.get("rocm")
    return f"built for CUDA {cuda}" if cuda else f"built for ROCm {rocm}" if rocm else "built for the CPU"


def _backends(facts: dict[str, Any]) -> list[Finding]:
    gloo, nccl = facts.get("gloo"), facts.get("nccl")
    findings = [
        ok("gloo", "built")
        if gloo
        else broken("gloo", "not built into this torch", "Ranks meet over it: install torch's own wheel.")
    ]
    if nccl:
        findings.append(ok("nccl", nccl))
    elif facts.get("gpus"):
        advice = "GPUs exchange gradients over it: install torch's CUDA wheel (or ROCm's)."
        findings.append(broken("nccl", facts.get("nccl error") or "not built into this torch", advice))
    else:
        findings.append(ok("nccl", "not built; needed on GPUs only"))
    return findings


def _rest(request: Request) -> list[Finding]:
    """Lightning imports torchvision where it is installed, and fails with it."""
    modules = ["torchvision", "lightning.pytorch", "lightning_ring.integrations.lightning.strategy"]
    if version("torchvision") is None:
        modules.remove("torchvision")
    answer = ask([sys.executable, "-c", _REST, *modules], request.at_most(_SECONDS), request.child_environ)
    if not answer.problem:
        return [ok("import lightning", ", ".join(modules))]
    reached = [line for line in answer.stdout.splitlines() if line in modules] or modules[:1]
    package = reached[-1].partition(".")[0]
    if package == "torchvision":
        advice = "It was built for another torch: pip install --force-reinstall torch torchvision (in one command)."
    elif package == "lightning":
        advice = "pip install --force-reinstall 'lightning!=2.6.2,!=2.6.3'"
    else:
        advice = "Reinstall lightning-ring; if it stays, report it with these lines."
    return [broken(f"import {package}", _why(answer), advice)]


def _why(answer: Answer) -> str:
    return answer.last_error if answer.problem.startswith("ended with exit code") else f"it {answer.problem}"
