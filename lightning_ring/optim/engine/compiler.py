"""The C++ compiler of this machine, and a cache of the libraries it made."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

FLAGS = (
    "-std=c++17",
    "-O3",
    "-shared",
    "-fPIC",
    "-pthread",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
)
TIMEOUT = 120  # seconds; a compilation takes about one


def find_compiler() -> list[str] | None:
    """The command of a C++ compiler: ``$CXX``, or the first of c++, g++ and clang++ on the path;
    None without one.
    """
    if os.environ.get("CXX"):
        command = shlex.split(os.environ["CXX"])
        return command if shutil.which(command[0]) else None
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    return [found] if found else None


def require_compiler() -> list[str]:
    """The compiler's command. Raises `RuntimeError`: there is none."""
    command = find_compiler()
    if command is None:
        looked = (
            f"$CXX={os.environ['CXX']!r}" if os.environ.get("CXX") else "$CXX, c++, g++ and clang++"
        )
        raise RuntimeError(
            "fused=True on the CPU needs a C++ compiler, and none was found (looked for "
            f"{looked}). Install one (such as the package g++), or leave fused=None for the "
            "multi-tensor way."
        )
    return command


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``$LIGHTNING_RING_CACHE``, or the user's cache folder."""
    if os.environ.get("LIGHTNING_RING_CACHE"):
        return Path(os.environ["LIGHTNING_RING_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_ring"


@functools.cache
def load(source: str) -> ctypes.CDLL:
    """Compile ``source``, or take it from the cache, and load it.

    Any number of processes may do so at the same time: each compiles to a file of its own and
    renames it. Raises `RuntimeError`: no compiler, or it failed.
    """
    command = require_compiler()
    # The CPU is in the key because the code is made for this one; home folders are shared between
    # machines.
    key = hashlib.sha256("\0".join((source, *command, *FLAGS, _cpu())).encode()).hexdigest()[:32]
    folder = cache_folder()
    path = folder / f"{key}.so"
    if not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            scratch = tempfile.TemporaryDirectory(dir=folder)
        except OSError:  # a read-only home: compile for this process alone
            folder = Path(tempfile.mkdtemp(prefix="lightning_ring_"))
            path = folder / f"{key}.so"
            scratch = tempfile.TemporaryDirectory(dir=folder)
        with scratch as name:
            _compile(command, source, Path(name) / "kernel.cpp", Path(name) / "kernel.so")
            (Path(name) / "kernel.so").replace(path)
    return ctypes.CDLL(str(path))


def _compile(command: list[str], source: str, source_path: Path, library_path: Path) -> None:
    source_path.write_text(source)
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    full = [*command, *FLAGS, native, str(source_path), "-o", str(library_path)]
    done = subprocess.run(full, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            "The C++ compiler failed on the fused optimizer kernel: "
            f"{shlex.join(full)}\n{done.stderr[-2000:]}\nIt has to know C++17 (for float16 "
            "parameters also _Float16: GCC 12, Clang 15). Set CXX to another one, or leave "
            "fused=None for the multi-tensor way."
        )


@functools.cache
def _cpu() -> str:
    """Architecture and instruction sets of this processor, on which the compiled code depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        flags = platform.processor()
    return f"{platform.system()} {platform.machine()} {flags}"
