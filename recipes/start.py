"""The first second of a run: mistakes that can be seen without torch, and the start of the
ranks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lightning_ring.errors import ConfigurationError
from lightning_ring.launch.script import JobFinished, script_job
from recipes.batch_size import classes_per_batch, per_rank_batch_size
from recipes.launcher import launcher_size

_NAMES_OF_CHECKPOINTS = ("best", "last", "hpc", "registry")  # Lightning finds these itself
_DEVICE_FILES = ("nvidia[0-9]*", "kfd", "dxg")  # of CUDA, ROCm, and CUDA in WSL


def check(config: DictConfig) -> None:
    """Refuse what can be seen to be wrong before anything that takes seconds.

    Raises:
        ConfigurationError: A GPU that this machine does not have, a checkpoint that is not there, a
            batch that does not divide by the ranks, or text in place of a number.
    """
    _check_numbers(config)
    if config.trainer.accelerator in ("gpu", "cuda") and not any(
        any(Path("/dev").glob(name)) for name in _DEVICE_FILES
    ):
        raise ConfigurationError(
            f"{config.name} trains on a GPU (trainer.accelerator={config.trainer.accelerator}), "
            "and this machine has none. On CPUs: trainer=cpu trainer.devices=2, and a "
            "data.batch_size that fits them."
        )
    _check_checkpoint(config.ckpt_path)
    ranks = _world_size(config)
    if ranks is not None and "batch_size" in config.data:
        per_rank_batch_size(config.data.batch_size, ranks)
        if config.data.get("sampler") == "pxk":
            classes_per_batch(config.data.batch_size, ranks, config.data.images_per_class)


def start_ranks(config: DictConfig) -> None:
    """Start the ranks, if this is the plain ``python`` that a person typed, and wait for them; in a
    rank do nothing.

    `RingStrategy` would start them too, but only after this process has imported torch and built
    the model in vain.

    Raises:
        JobFinished: With the job's exit code.
    """
    strategy, devices = config.strategy, config.trainer.devices
    if (
        strategy.get("_target_") == "lightning_ring.RingStrategy"
        and strategy.start_method == "popen"
        and type(devices) is int
        and devices > 1
        and config.trainer.num_nodes == 1
        and launcher_size() is None
        and "RING_LAUNCHER_PID" not in os.environ
    ):
        with script_job(devices, use_mpi=strategy.backend in ("auto", "mpi")) as job:
            raise JobFinished(job.run())


def _check_numbers(config: DictConfig) -> None:
    """What was a number in the files must not be text on the command line, but for
    ``devices=auto``.
    """
    if not GlobalHydra.instance().is_initialized():  # composed by another program
        return
    hydra = HydraConfig.get()
    given = [override.partition("=") for override in hydra.overrides.task]
    changed = [
        key
        for key, _, _ in given
        if key not in hydra.runtime.choices and key != "trainer.devices" and key[0] != "+"
    ]
    if not changed:
        return
    groups = ["".join(parts) for parts in given if parts[0] in hydra.runtime.choices]
    default = compose(hydra.job.config_name, overrides=groups)
    for key in changed:
        before, now = _value(default, key), _value(config, key)
        if type(before) in (int, float) and isinstance(now, str):
            raise ConfigurationError(
                f"{key}={now}: expected a number, such as {before}, its default."
            )


def _value(config: DictConfig, key: str) -> Any:
    return OmegaConf.select(config, key, throw_on_missing=False)


def _check_checkpoint(name: str | None) -> None:
    if name is None or name in _NAMES_OF_CHECKPOINTS or "://" in name or Path(name).exists():
        return
    folder = next(folder for folder in Path(name).absolute().parents if folder.is_dir())
    # not below: a disk may be large
    near = sorted((*folder.glob("*.ckpt"), *folder.glob("checkpoints/*.ckpt")))[:3]
    hint = (
        f" There are: {', '.join(map(str, near))}."
        if near
        else " Runs keep theirs in FOLDER/checkpoints/."
    )
    raise ConfigurationError(
        f"ckpt_path={name} does not exist; the nearest folder that does is {folder}.{hint}"
    )


def _world_size(config: DictConfig) -> int | None:
    """The ranks that will train; ``None`` where only torch can count the devices."""
    if (size := launcher_size()) is not None:
        return size
    devices = config.trainer.devices
    return devices * config.trainer.num_nodes if type(devices) is int and devices > 0 else None
