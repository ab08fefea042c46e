from dataclasses import astuple

import pytest

from lightning_ring.errors import RankDiscoveryError
from lightning_ring.job.launchers import first_host, launcher_variables, tasks_per_node

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MVAPICH = {f"MV2_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK")}
MVAPICH["MV2_COMM_WORLD_SIZE"] = "2"
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PMIX = {"PMIX_RANK": "2", "PMIX_NAMESPACE": "slurm.pmix.17.0"}
BY_HAND = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN = BY_HAND | {"TORCHELASTIC_RUN_ID": "7", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}

BATCH_SHELL = {  # as sbatch sets it for the script: not a step
    "SLURM_JOB_ID": "17",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NUM_NODES": "2",
}
SRUN_STEP = BATCH_SHELL | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
JSRUN = {  # the variables that Lightning's LSFEnvironment reads too
    "LSB_JOBID": "7",
    "JSM_NAMESPACE_RANK": "5",
    "JSM_NAMESPACE_SIZE": "8",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "4",
}
FLUX = {
    "FLUX_JOB_ID": "f1",
    "FLUX_TASK_RANK": "5",
    "FLUX_JOB_SIZE": "8",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "2",
}
BLAUNCH = {"LSB_JOBID": "7", "LSF_PM_TASKID": "2", "LSB_MCPU_HOSTS": "one 2 two 2"}
PBSDSH = {"PBS_JOBID": "7", "PBS_NODENUM": "1", "PBS_TASKNUM": "2", "PBS_NODEFILE": "/nodes"}
RINGRUN = {"RING_RANK": "1", "RING_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "source", "expected"),
    [
        (OPEN_MPI, "mpi", (1, 4, 1, 2, None, None)),
        (MVAPICH, "mpi", (0, 2, 0, None, None, None)),
        (MPICH, "mpi", (1, 2, 1, 2, None, None)),
        (SRUN_STEP | PMIX, "mpi", (2, 3, 0, 1, 1, 2)),
        (JSRUN, "mpi", (5, 8, 1, 4, None, None)),
        (FLUX, "mpi", (5, 8, 1, None, None, None)),
        (RINGRUN, "ringrun", (1, 2, 1, 2, 0, 1)),
        (TORCHRUN, "torchrun", (3, 4, 1, 2, 1, 2)),
        (BY_HAND, "torchrun", (3, 4, 1, 2, 1, 2)),
        (SRUN_STEP, "slurm", (2, 3, 0, 1, 1, 2)),
        # a cluster's prologue, or a job script for another program, sets some of torchrun's
        # variables
        (SRUN_STEP | {"LOCAL_RANK": "1"}, "slurm", (2, 3, 0, 1, 1, 2)),
        (SRUN_STEP | {"RANK": "0", "WORLD_SIZE": "8"}, "slurm", (2, 3, 0, 1, 1, 2)),
    ],
)
def test_every_launcher_is_read(environ, source, expected):
    found, _, *place = astuple(launcher_variables(environ))
    assert (found, *place) == (source, *expected)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH_SHELL,
        BATCH_SHELL | {"RANK": "0", "WORLD_SIZE": "2"},
        SRUN_STEP | {"SLURM_STEP_NUM_TASKS": "1", "LOCAL_RANK": "3"},
        SRUN_STEP | {"SLURM_STEP_ID": "4294967290"},  # salloc's interactive step
        BLAUNCH,
        PBSDSH,
        {"PMIX_RANK": "0", "PMIX_NAMESPACE": "somebody"},  # a PMIx server that is no MPI launcher
    ],
)
def test_one_process_is_no_rank_of_a_launcher(environ):
    assert launcher_variables(environ) is None


@pytest.mark.parametrize(
    ("environ", "source"),
    [
        # mpirun inside sbatch: Lightning's own choice is Slurm, and rank 0 twice
        (BATCH_SHELL | OPEN_MPI, "mpi"),
        (SRUN_STEP | OPEN_MPI, "mpi"),  # mpirun starts its daemons through srun
        (OPEN_MPI | TORCHRUN, "torchrun"),  # mpirun, one torchrun a node
        (SRUN_STEP | TORCHRUN, "torchrun"),
        (BATCH_SHELL | RINGRUN, "ringrun"),
        (BLAUNCH | TORCHRUN, "torchrun"),  # a torchrun on each host
        (PBSDSH | OPEN_MPI, "mpi"),
        # all four: each task starts several
        (SRUN_STEP | BY_HAND, "torchrun"),
        (BATCH_SHELL | OPEN_MPI | {"LOCAL_RANK": "0"}, "mpi"),
        # exported by a job script for another purpose
        (OPEN_MPI | {"RANK": "0", "WORLD_SIZE": "9"}, "mpi"),
    ],
)
def test_the_nearest_launcher_counts(environ, source):
    assert launcher_variables(environ).source == source


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            {"OMPI_COMM_WORLD_RANK": "0"},
            ["OMPI_COMM_WORLD_SIZE is not set", "OMPI_COMM_WORLD_RANK=0"],
        ),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "4"}, ["rank 4", "world size is 4", "Open MPI"]),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "four"}, ["OMPI_COMM_WORLD_SIZE='four'"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["LOCAL_RANK is not set", "RANK=0", "WORLD_SIZE=2"]),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "2", "NODE_RANK": "0"}, ["RANK is not set"]),
        (BY_HAND | {"WORLD_SIZE": "5"}, ["WORLD_SIZE=5", "LOCAL_WORLD_SIZE=2", "GROUP_RANK"]),
        (TORCHRUN | {"LOCAL_RANK": "2"}, ["local rank 2", "torchrun"]),
        (
            SRUN_STEP | {"SLURM_STEP_TASKS_PER_NODE": "2"},
            ["SLURM_STEP_TASKS_PER_NODE='2'", "SLURM_STEP_NUM_TASKS=3"],
        ),
        ({"RING_RANK": "0"}, ["RING_WORLD_SIZE is not set"]),
        (SRUN_STEP | {"PMIX_RANK": "1", "PMIX_NAMESPACE": "x"}, ["PMIX_RANK=1", "SLURM_PROCID=2"]),
    ],
)
def test_what_does_not_add_up_is_named(environ, words):
    with pytest.raises(RankDiscoveryError) as error:
        launcher_variables(environ)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2(x3),1", [2, 2, 2, 1]), ("", []), ("2,x", [])],
)
def test_tasks_per_node(text, counts):
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu1,gpu2", "gpu1"),
        ("gpu[03-05,9],login", "gpu03"),
        ("rack-a-n[7]", "rack-a-n7"),
        ("n[1-2]-ib,m", "n1-ib"),
    ],
)
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host


def test_first_host_of_nothing():
    with pytest.raises(RankDiscoveryError, match="MASTER_ADDR"):
        first_host("")
