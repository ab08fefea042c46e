"""GPUs, their driver and their links. None is needed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from lightning_ring.tools.doctor.asking import DoctorRequest, ask
from lightning_ring.tools.doctor.findings import Finding, broken, ok, warning
from lightning_ring.tools.doctor.packages import torch_facts

_SECONDS = 20.0
_QUERY = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def check(request: DoctorRequest) -> list[Finding]:
    facts, _ = torch_facts(request)
    listed, driver = _driver(request)
    if not facts:
        return driver  # that torch is broken is said where it is imported
    gpus: list[dict[str, Any]] = facts.get("gpus") or []
    if not gpus:
        return [*driver, _none(facts, listed, request.environ)]
    return [
        *driver,
        *(_gpu(number, gpu) for number, gpu in enumerate(gpus)),
        *_links(gpus),
    ]


def _driver(request: DoctorRequest) -> tuple[int, list[Finding]]:
    """The number of GPUs that nvidia-smi lists, and findings on the driver."""
    if shutil.which("nvidia-smi") is None:
        return 0, []
    answer = ask(_QUERY, request.at_most(_SECONDS), request.child_environ)
    if answer.problem:
        said = " ".join((answer.stdout + answer.stderr).split())[:200] or f"it {answer.problem}"
        advice = (
            "The driver does not run: after an upgrade of it, restart the machine (`dmesg` may "
            "say more)."
        )
        return 0, [broken("driver", f"nvidia-smi: {said}", advice)]
    lines = [line for line in answer.stdout.splitlines() if line.strip()]
    version = lines[0].split(",")[0].strip() if lines else "no GPU"
    return len(lines), [ok("driver", f"NVIDIA {version}, {len(lines)} GPU(s)")]


def _none(facts: Mapping[str, Any], listed: int, environ: Mapping[str, str]) -> Finding:
    if not listed:
        return ok("GPUs", "none: ranks train on the CPU")
    hidden = [f"{name}={environ[name]!r}" for name in _HIDING if name in environ]
    if hidden:
        return warning(
            "GPUs",
            f"{listed} there, none visible: {', '.join(hidden)}",
            "Unset it, or list GPUs: 0,1.",
        )
    if not (facts.get("cuda") or facts.get("rocm") or facts.get("xpu")):
        advice = (
            "This torch is built for the CPU. Install CUDA's: pip install --force-reinstall torch "
            "torchvision"
        )
        return broken("GPUs", f"{listed} there, torch uses none", advice)
    why = facts.get("gpus error") or "it gives no reason"
    advice = (
        f"This torch is built for CUDA {facts.get('cuda')}: the driver must be new enough, and "
        "visible here."
    )
    return broken("GPUs", f"{listed} there, torch uses none: {why}", advice)


def _gpu(number: int, gpu: Mapping[str, Any]) -> Finding:
    name = f"GPU {number}"
    capability = f", compute capability {gpu['capability']}" if gpu["capability"] else ""
    found = f"{gpu['vendor']} {gpu['name']}, {gpu['memory'] / 2**30:.0f} GiB{capability}"
    if gpu["error"]:
        advice = (
            "Other programs may fill it (nvidia-smi), or this torch has no code for it: install a "
            "newer torch."
        )
        return broken(name, f"{found}: {gpu['error']}", advice)
    return ok(name, found)


def _links(gpus: list[dict[str, Any]]) -> list[Finding]:
    if len(gpus) < 2:
        return []
    without = sum(len(gpus) - 1 - len(gpu["peers"]) for gpu in gpus)
    if without:
        advice = (
            "Gradients go through the host's memory. Containers and virtual machines may lack "
            "peer access (ACS)."
        )
        return [warning("GPU links", f"{without} of the pairs have no peer access", advice)]
    return [ok("GPU links", "all with peer access")]
