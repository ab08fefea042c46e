"""Ranks and devices for Lightning: the cluster environment, and the requested devices."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import socket
import sys
import warnings
from collections.abc import Iterable
from secrets import token_hex
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.connector import _Connector
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_ring.errors import ConfigurationError, RankDiscoveryError
from lightning_ring.job.job import current_job
from lightning_ring.job.launchers import LaunchVariables, launcher_variables
from lightning_ring.job.members import JobMember, info_of, shares_gpus
from lightning_ring.job.ranks import SINGLE, RankInfo, discover_ranks, info_from_variables
from lightning_ring.job.rendezvous.door import SECRET
from lightning_ring.job.rendezvous.greeting import reserve_port


class RingEnvironment(ClusterEnvironment):
    """Rank and world size for Lightning, from one `RankInfo`.

    It takes the ranks of this process's open job, else the launcher's variables, else the open
    process group, and opens nothing. MPI starts at `discover`, or at the first question that only
    MPI can answer (`node_rank`, with several nodes). Otherwise a process is one rank until
    Lightning spawns or forks more.

    Raises:
        RankDiscoveryError: The launcher's variables are incomplete or contradict each other.
    """

    def __init__(self, caller: str = "Trainer") -> None:
        self._caller = caller  # for errors
        self._variables: LaunchVariables | None = None
        self._info: RankInfo | None = None
        self._reserved: socket.socket | None = None  # holds `main_port` until rank 0 listens there
        if self._of_current_job() is None:
            self._variables = _launcher_or_open_group()
            if self._variables is None:
                self._info = SINGLE
            elif self._variables.source not in ("mpi", "group"):
                self._info = info_from_variables(self._variables)
        # Lightning takes every rank of MPI for rank 0
        rank_zero_only.rank = self.global_rank()  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_reserved": None}  # a spawned rank gets the port's number

    @staticmethod
    def detect() -> bool:
        return launcher_variables(os.environ) is not None

    def discover(self) -> RankInfo:
        """This process's full `RankInfo`. With MPI, starts it, and is collective the first time."""
        if self._of_current_job() is None and self._info is None:
            by_group = self._variables is not None and self._variables.source == "group"
            self._info = _info_from_open_group() if by_group else discover_ranks()
        assert self._info is not None
        return self._info

    def _of_current_job(self) -> RankInfo | None:
        """The job of this process may have fewer ranks than were launched."""
        job = current_job()
        if job is None or job.info.source in ("single", "spawn"):
            return None
        self._info = job.info
        return self._info

    @property
    def creates_processes_externally(self) -> bool:
        return self._variables is not None or self.discover().source not in ("single", "spawn")

    @property
    def main_address(self) -> str:
        return self._main[0]

    @property
    def main_port(self) -> int:
        return self._main[1]

    @functools.cached_property
    def _main(self) -> tuple[str, int]:
        if self.creates_processes_externally:
            address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
            if address and port:
                return address, int(port)
            raise RankDiscoveryError(
                "main_address and main_port are not known: the ranks of this launcher meet "
                "without them. Set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port "
                "there if your code needs them."
            )
        # in the parent of spawned ranks: MASTER_ADDR and MASTER_PORT may be another job's
        self._reserved = reserve_port()
        os.environ[SECRET] = token_hex(16)
        return self._reserved.getsockname()

    @property
    def _known(self) -> RankInfo | LaunchVariables:
        """What is known without starting MPI."""
        if self._info is None and self._variables is not None:
            return self._variables
        return self.discover()

    def world_size(self) -> int:
        return self._known.world_size

    def global_rank(self) -> int:
        return self._known.rank

    def local_rank(self) -> int:
        if not self.creates_processes_externally:
            if self._info == SINGLE and multiprocessing.parent_process() is None:
                return 0  # a LOCAL_RANK that a cluster's prologue left
            return int(os.environ.get("LOCAL_RANK", 0))
        known = self._known.local_rank
        return self.discover().local_rank if known is None else known

    def local_size(self) -> int:
        return self._known.local_size or self.discover().local_size

    def num_nodes(self) -> int:
        return 1 if self._known.local_size == self.world_size() else self.discover().num_nodes

    def node_rank(self) -> int:
        return 0 if self.num_nodes() == 1 else self.discover().node_rank

    # Lightning computes ranks as if placed in blocks: the launcher's stay

    def set_world_size(self, size: int) -> None:
        if not self.creates_processes_externally and size != self.world_size():
            self._info = _spawned(self.global_rank(), size)

    def set_global_rank(self, rank: int) -> None:
        if not self.creates_processes_externally and rank != self.global_rank():
            self._info = _spawned(rank, max(self.world_size(), rank + 1))

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Refuse ``devices`` and ``num_nodes`` that are not what the launcher started.

        1 is also what Lightning makes of a ``num_nodes`` that nobody wrote.
        """
        if not self.creates_processes_externally:
            return
        local_size, nodes = self.local_size(), self.num_nodes()
        if num_devices == local_size and num_nodes in (1, nodes):
            return
        raise RankDiscoveryError(
            f"{self._caller}(devices={num_devices}, num_nodes={num_nodes}) asks for "
            f"{num_devices * num_nodes} ranks, but {self.launcher_name()} started "
            f"{self.world_size()}: {local_size} on this node, nodes: {nodes}. Leave devices and "
            f"num_nodes out to take what was started, or set devices={local_size}, "
            f"num_nodes={nodes}."
        )

    def launcher_name(self) -> str:
        return self._variables.launcher if self._variables is not None else self.discover().source


def _launcher_or_open_group() -> LaunchVariables | None:
    """The launcher's variables. Lightning's DDP starts ranks with fewer, and removes one after a
    fit: an open process group then has the rest."""
    group: LaunchVariables | None = None
    if dist.is_initialized() and dist.get_world_size() > 1:
        ranks = dist.get_rank(), dist.get_world_size()
        group = LaunchVariables("group", "torch.distributed", *ranks)
    try:
        return launcher_variables(os.environ) or group
    except RankDiscoveryError:
        if group is None:
            raise
        return group


def _info_from_open_group() -> RankInfo:
    """Collective over torch.distributed's default group."""
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    members = [JobMember(rank, hosts.index(host)) for rank, host in enumerate(hosts)]
    return info_of(dist.get_rank(), members, "group", 0)


def _spawned(rank: int, world_size: int) -> RankInfo:
    return RankInfo(rank, world_size, rank, world_size, node_rank=0, num_nodes=1, source="spawn")


def environment_of(strategy: Any, plugins: Any, caller: str) -> RingEnvironment:
    """The environment of ``strategy``, or of its name.

    Raises:
        ConfigurationError: There is a cluster environment among ``plugins``, other than Ray's.
    """
    named = isinstance(strategy, str)
    environment = RingEnvironment(caller) if named else strategy.cluster_environment
    for plugin in plugins if isinstance(plugins, Iterable) else [plugins]:
        if isinstance(plugin, ClusterEnvironment):
            name = type(plugin).__name__
            # Every example of Ray has it. It takes the same ranks from the worker of Ray.
            if name == "RayLightningEnvironment":
                continue
            found = "no launcher, and one process"
            if environment.creates_processes_externally:
                found = (
                    f"rank {environment.global_rank()} of {environment.world_size()}, started by "
                    f"{environment.launcher_name()}"
                )
            raise ConfigurationError(
                f"{caller}(plugins=[{name}()]) was called. The strategy finds the ranks itself: "
                f"{found}. Leave {name} out. If the ranks are other ones, export RANK, "
                "WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each. "
                "Requeueing by Slurm is RingStrategy(requeue_signal=...)."
            )
    return environment


_CONNECTORS = (_AcceleratorConnector.__init__.__code__, _Connector.__init__.__code__)


def devices_left_out() -> bool:
    """Whether the Trainer or Fabric that is being built was given no ``devices``.

    Lightning keeps only the number that it makes of ``"auto"``. The connector's arguments on the
    stack tell a request for one device from none.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code not in _CONNECTORS:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is None or frame.f_locals["devices"] == "auto"


def devices_for(
    accelerator: Accelerator, found: list[torch.device], local_size: int
) -> list[torch.device]:
    """One device for each of the ``local_size`` ranks on this node, of the kind of those that
    Lightning ``found``. More ranks than devices are an error.

    A process that sees one GPU has its own (Slurm's ``--gpus-per-task=1``), which every rank calls
    GPU 0. `check_gpu_assignment` compares UUIDs.
    """
    kind = found[0].type
    if kind == "cpu":
        return found[:1] * local_size
    if len(found) == local_size:
        return found
    there = accelerator.auto_device_count()
    if kind == "cuda" and (there == 1 or shares_gpus()):
        gpus = accelerator.get_parallel_devices(list(range(there)))
        return [gpus[rank % there] for rank in range(local_size)]
    if there < local_size:
        raise RankDiscoveryError(
            f"the launcher started {local_size} ranks on this node, which has {there} "
            f"{type(accelerator).__name__} device(s): rank {there} and rank 0 would share one. "
            f"Start at most {there} ranks on this node, or use accelerator='cpu'."
        )
    return accelerator.get_parallel_devices(accelerator.parse_devices(local_size))


_RANK_0_SAYS = ("GPU available", "TPU available", "💡 Tip")


def leave_start_up_messages_to_rank_0() -> None:
    """In the process that starts the ranks: rank 0 prints these."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: not record.getMessage().startswith(_RANK_0_SAYS)
    )


def ignore_deprecations_between_libraries() -> None:
    """Lightning's calls of torch's deprecated functions are not the user's to change.

    Filters that are there already come first: ``python -W default::FutureWarning`` shows them.
    """
    for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
        warnings.filterwarnings(
            "ignore", "", category, module=r"(lightning|torch|torchmetrics)(\.|$)", append=True
        )
