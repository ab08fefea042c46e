"""Ranks as Lightning sees them, and GPUs as ranks get them."""

import os
import pickle
import socket
import sys
from types import SimpleNamespace

import lightning as L
import pytest
from lightning.fabric.plugins.environments import (
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_ring import RingFabricStrategy, RingStrategy
from lightning_ring.errors import ConfigurationError, RankDiscoveryError
from lightning_ring.integrations.ranks.environment import RingEnvironment
from lightning_ring.job import ranks
from lightning_ring.job.ranks import SINGLE, discover_ranks
from lightning_ring.job.rendezvous.greeting import listen
from tests.job.test_launchers import BY_HAND as TWO_NODES
from tests.job.test_launchers import SRUN_STEP, TORCHRUN
from tests.processes import clean_env, mpi_family, run

# Open MPI without mpirun leaves its segment in /dev/shm behind
NO_SHARED_MEMORY = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self"}


@pytest.fixture
def launched(monkeypatch):
    """Replace this process's launcher variables by the ones given."""

    def replace(**variables):
        for name in set(os.environ) - set(clean_env()):
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    before = rank_zero_only.rank
    yield replace
    rank_zero_only.rank = before


def numbers(environment):
    ranks = environment.global_rank(), environment.world_size()
    place = environment.local_rank(), environment.local_size()
    return *ranks, *place, environment.node_rank(), environment.num_nodes()


def test_nothing_started_us(launched):
    launched()
    before = "mpi4py.MPI" in sys.modules
    environment = RingEnvironment()
    assert discover_ranks() == SINGLE
    assert environment.world_size() == 1
    assert not environment.creates_processes_externally
    assert not RingEnvironment.detect()
    assert ("mpi4py.MPI" in sys.modules) == before, "a laptop without MPI must not import it"
    # not started yet: whatever is asked for
    environment.validate_settings(num_devices=4, num_nodes=1)


def test_a_launcher_started_us(launched):
    launched(**TWO_NODES)
    environment = RingEnvironment()
    assert environment.creates_processes_externally
    assert RingEnvironment.detect()
    environment.set_global_rank(2)  # what Lightning may not change
    environment.set_world_size(9)
    assert numbers(environment) == (3, 4, 1, 2, 1, 2)
    assert rank_zero_only.rank == 3


def test_lightning_numbers_the_processes_it_forks(launched, monkeypatch):
    launched(MASTER_ADDR="192.0.2.200", MASTER_PORT="1")  # of another job
    environment = RingEnvironment()
    assert environment.main_address == "127.0.0.1"
    port = environment.main_port
    assert environment.main_port == port > 0  # chosen in the parent, the same for all
    assert pickle.loads(pickle.dumps(environment)).main_port == port  # ``start_method="spawn"``
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))  # until rank 0 listens, no other program is given it
    listen("127.0.0.1", port).close()
    # in the child, Lightning's launcher sets it and then computes the rest
    monkeypatch.setenv("LOCAL_RANK", "1")
    environment.set_global_rank(1)
    environment.set_world_size(2)
    assert numbers(environment) == (1, 2, 1, 2, 0, 1)
    assert environment.discover().source == "spawn"


def test_a_stray_local_rank_is_not_a_single_process_s(launched):
    launched(SLURM_JOB_ID="7", LOCAL_RANK="3")
    assert RingEnvironment().local_rank() == 0


@pytest.mark.parametrize("name", ["ring", "ring_sharded"])
def test_a_trainer_with_the_strategy_by_name_does_not_ask_lightning_s_slurm(launched, name):
    launched(
        SLURM_JOB_ID="7", SLURM_NTASKS="2", SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0"
    )
    trainer = L.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False)
    assert type(trainer._accelerator_connector.cluster_environment) is RingEnvironment
    with pytest.raises(RuntimeError, match="ntasks"):  # others' strategies are as they were
        L.Trainer(strategy="ddp", accelerator="cpu", devices=2, logger=False)


# what Lightning's own environment asks for
SRUN = SRUN_STEP | {"SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "train"}


@pytest.mark.parametrize(
    ("variables", "environment", "found"),
    [
        (TORCHRUN, TorchElasticEnvironment, "rank 3 of 4, started by torchrun"),
        (SRUN, SLURMEnvironment, "rank 2 of 3, started by srun"),
        ({}, LightningEnvironment, "no launcher, and one process"),
    ],
)
def test_a_cluster_environment_is_refused_with_the_ranks_found(
    launched, variables, environment, found
):
    launched(**variables)
    settings = {"accelerator": "cpu", "devices": "auto", "plugins": [environment()]}
    for strategy in ("ring", RingStrategy()):
        with pytest.raises(ConfigurationError, match=rf"Trainer\(plugins=\[.*{found}"):
            L.Trainer(strategy=strategy, logger=False, **settings)
    for strategy in ("ring", RingFabricStrategy()):
        with pytest.raises(ConfigurationError, match=rf"Fabric\(plugins=\[.*{found}"):
            L.Fabric(strategy=strategy, **settings)


def test_mpi_variables_answer_without_starting_mpi(launched):
    before = "mpi4py.MPI" in sys.modules
    names = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    launched(**{f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()})
    environment = RingEnvironment()
    assert numbers(environment) == (1, 2, 1, 2, 0, 1)
    assert environment.creates_processes_externally
    assert ("mpi4py.MPI" in sys.modules) == before


@pytest.mark.parametrize(("devices", "nodes"), [(4, 1), (2, 3), (1, 2)])
def test_a_trainer_that_disagrees_is_told_both(launched, devices, nodes):
    launched(**TWO_NODES)
    with pytest.raises(RankDiscoveryError) as error:
        RingEnvironment().validate_settings(num_devices=devices, num_nodes=nodes)
    told = rf"\(devices={devices}, num_nodes={nodes}\).* started 4.*devices=2, num_nodes=2"
    assert error.match(told)
    for nodes in (1, 2):  # 1: as if left out
        RingEnvironment().validate_settings(num_devices=2, num_nodes=nodes)


def test_the_main_address_is_that_of_the_variables(launched):
    launched(**TWO_NODES)
    with pytest.raises(RankDiscoveryError, match="Set MASTER_ADDR"):
        _ = RingEnvironment().main_address
    launched(**TWO_NODES, MASTER_ADDR="10.0.0.1", MASTER_PORT="4711")
    environment = RingEnvironment()
    assert (environment.main_address, environment.main_port) == ("10.0.0.1", 4711)


DISCOVER = "from lightning_ring.job.ranks import discover_ranks; print(discover_ranks())"


@pytest.mark.ranks
@pytest.mark.skipif(mpi_family() != "openmpi", reason="no mpirun of Open MPI beside this Python")
def test_an_mpi4py_that_the_launcher_does_not_reach():
    variables = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    result = run([sys.executable, "-c", DISCOVER], **variables, **NO_SHARED_MEMORY)
    assert result.returncode != 0
    assert "mpi4py sees rank 0 of 1, but" in result.stdout
    assert "rank 0 of 2" in result.stdout


ON_ONE_NODE = {f"SLURM_{name}": "0" for name in ("STEP_ID", "NODEID")}
ON_ONE_NODE |= {f"SLURM_{name}": "1" for name in ("PROCID", "LOCALID", "STEP_NUM_NODES")}
ON_ONE_NODE |= {f"SLURM_STEP_{name}": "2" for name in ("NUM_TASKS", "TASKS_PER_NODE")}


def test_under_srun_with_pmix_nodes_are_slurm_s(monkeypatch):
    alone = SimpleNamespace(
        rank=0, size=1, bcast=lambda rank: rank, Free=lambda: None
    )  # what Open MPI 5 was seen to say
    world = SimpleNamespace(
        rank=1, size=2, Split_type=lambda *args, **kwargs: alone, allgather=lambda rank: [0, 1]
    )
    monkeypatch.setattr(
        ranks, "import_mpi", lambda launcher: SimpleNamespace(COMM_WORLD=world, COMM_TYPE_SHARED=1)
    )
    info = discover_ranks(ON_ONE_NODE | {"PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.7.0"})
    assert (info.source, info.local_rank, info.local_size, info.num_nodes) == ("mpi", 1, 2, 1)


@pytest.mark.ranks
@pytest.mark.skipif(not mpi_family(), reason="no mpirun beside this Python")
def test_a_launcher_of_another_mpi_is_an_error_before_mpi_starts():
    """MPICH, started by Open MPI's mpirun, ends the process in C with `internal_Init_thread
    failed`.
    """
    hydra = mpi_family() != "openmpi"
    family = "OMPI_COMM_WORLD" if hydra else "PMI"
    # the same, asked again
    program = f"try: {DISCOVER}\nexcept Exception as error: print(error)\n{DISCOVER}"
    variables = {f"{family}_RANK": "0", f"{family}_SIZE": "2"}
    result = run([sys.executable, "-c", program], **variables, **NO_SHARED_MEMORY)
    assert result.returncode == 1, result.stdout
    other = "Open MPI" if hydra else "MPICH or Intel MPI"
    assert (
        result.stdout.count(
            f"but the mpirun of {other} started this process. Use the mpirun beside"
        )
        == 2
    )


@pytest.mark.ranks
def test_mpi_variables_without_mpi4py():
    program = f"import sys; sys.modules['mpi4py'] = None; {DISCOVER}"
    variables = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    result = run([sys.executable, "-c", program], **variables)
    assert result.returncode != 0
    assert "Open MPI started this process, but mpi4py cannot be used" in result.stdout
    assert "pip install lightning-ring[openmpi]" in result.stdout


@pytest.mark.ranks
def test_a_cluster_that_offers_pmi_to_everything_is_still_slurm():
    variables = ON_ONE_NODE | {"PMI_RANK": "1", "PMI_SIZE": "2"} | NO_SHARED_MEMORY
    result = run([sys.executable, "-c", DISCOVER], **variables)
    assert "rank=1, world_size=2" in result.stdout
    assert "source='slurm'" in result.stdout
