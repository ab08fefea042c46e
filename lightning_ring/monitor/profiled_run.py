"""Properties of a Trainer that `RingProfile` records."""

from __future__ import annotations

import os
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer

from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.cost import CostModel
from lightning_ring.comm.hierarchical import HierarchicalCommunicator
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.accelerator import is_gpu
from lightning_ring.tools.plan.probing import measure_collectives
from lightning_ring.tools.plan.profile import Run


def check_can_record(path: Path, trainer: Trainer, module: LightningModule) -> None:
    """Raises `ConfigurationError`: names what stands in the way."""
    name = f"RingProfile({str(path)!r})"
    if trainer.is_global_zero and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        raise ConfigurationError(
            f"{name} cannot be written. Name a file in a folder that is there."
        )
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{name} records steps of automatic optimization: with manual optimization Lightning "
            "does not announce where backward begins and ends."
        )
    if trainer.accumulate_grad_batches != 1:
        raise ConfigurationError(
            f"{name} records steps of one batch, and accumulate_grad_batches is "
            f"{trainer.accumulate_grad_batches}. Record without accumulation."
        )
    if trainer.world_size == 1:
        return
    if communicator(trainer) is None:
        raise ConfigurationError(
            f"{name} records {type(trainer.strategy).__name__} on one rank only, and there are "
            f"{trainer.world_size}. Use strategy='ring', or devices=1."
        )
    if (
        algorithm := getattr(trainer.strategy, "algorithm", None)
    ) is not None and algorithm.steps_alone:
        raise ConfigurationError(
            f"{name} records when gradients are there to be sent, and {type(algorithm).__name__} "
            "sends none. Record with strategy='ring'."
        )
    if is_sharded(trainer) and is_gpu(trainer.strategy.root_device):
        raise ConfigurationError(
            f"{name} cannot tell, on a GPU, a forward that waits for sharded parameters from one "
            "that computes. Record with strategy='ring', or on one rank; `lightning-ring plan` "
            "predicts the sharded run from that."
        )


def communicator(trainer: Trainer) -> Communicator | None:
    """That of the ring; `None` on one rank."""
    return getattr(trainer.strategy, "_comm", None) if trainer.world_size > 1 else None


def is_sharded(trainer: Trainer) -> bool:
    options = getattr(trainer.strategy, "options", None)
    return options is not None and options.algorithm.sharded


def describe(trainer: Trainer, comm: Communicator | None, batch_size: int, steps: int) -> Run:
    where = (
        trainer.world_size,
        num_nodes(trainer),
        trainer.strategy.root_device.type,
        batch_size,
        steps,
    )
    options = getattr(trainer.strategy, "options", None)
    if options is None:  # not ours, on one rank
        return Run(*where)
    compression = options.compression
    return Run(
        *where,
        topology="hierarchical" if isinstance(comm, HierarchicalCommunicator) else "flat",
        sharded=is_sharded(trainer),
        compression=compression
        if compression is None or isinstance(compression, str)
        else compression.name,
        bucket_cap_mb=options.bucket_cap_mb,
    )


def num_nodes(trainer: Trainer) -> int:
    environment = getattr(trainer.strategy, "ring_environment", None)
    return int(trainer.num_nodes if environment is None else environment.num_nodes())


def measure_link(
    comm: Communicator | None, trainer: Trainer
) -> tuple[str | None, dict[str, CostModel] | None]:
    """Whether the ranks talk inside a ``"node"`` or over the ``"network"``, and what a message
    costs there, by collective. Nothing on one rank, and where several ranks on several nodes talk
    over both. Collective."""
    if comm is None or num_nodes(trainer) not in (1, comm.world_size):
        return None, None
    costs = measure_collectives(comm, trainer.strategy.root_device)
    return "node" if num_nodes(trainer) == 1 else "network", costs
