"""The first second of a run, before torch is imported: mistakes that can be seen, the folder of the
run, and the start of the ranks.
"""

import atexit
import contextlib
import itertools
import os
import re
import shutil
import tempfile
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lightning_ring.errors import ConfigurationError, RankDiscoveryError
from lightning_ring.job.launchers import launcher_variables
from lightning_ring.launch.script import JobFinished, script_job
from recipes.batch_size import classes_per_batch, per_rank_batch_size

MOST_CHARACTERS = 60  # of the overrides in the name of a folder


def place() -> tuple[int, int] | None:
    """Rank and world size that a launcher has told this process; `None` where there is none."""
    try:
        found = launcher_variables(os.environ)
    except RankDiscoveryError:  # a rank of DDP, or a contradiction that RingStrategy explains
        size = os.environ.get("WORLD_SIZE", "")
        return (int(os.environ.get("RANK", 0)), int(size)) if size.isdigit() else None
    return None if found is None else (found.rank, found.world_size)


def check(config: DictConfig) -> None:
    """Refuse missing values of the data before anything that takes seconds; also a batch that does
    not divide by the ranks and their classes, if ranks can be counted without torch.

    Raises:
        ConfigurationError: Names the keys, and the nearest batch sizes that divide.
    """
    missing = [f"data.{key}" for key in config.data if OmegaConf.is_missing(config.data, key)]
    if missing:
        raise ConfigurationError(
            f"{' and '.join(missing)} must be given. Add them to the command: "
            f"{' '.join(f'{key}=VALUE' for key in missing)}"
        )
    told, devices = place(), config.trainer.devices
    if told is None and (type(devices) is not int or devices < 1):
        return
    ranks = told[1] if told is not None else devices * config.trainer.num_nodes
    data = config.data
    if "batch_size" in data:
        per_rank_batch_size(data.batch_size, ranks)
    if data.get("sampler") == "pxk":
        classes_per_batch(data.batch_size, ranks, data.images_per_class, data.num_classes)


def start_ranks(config: DictConfig) -> None:
    """Start the ranks, if this is the plain ``python`` that a person typed, and wait for them; in a
    rank do nothing.

    `RingStrategy` would start them too, but only after this process has imported torch and built
    the model in vain. Raises `JobFinished` with the job's exit code.
    """
    strategy, devices = config.strategy, config.trainer.devices
    if (
        strategy.get("_target_") == "lightning_ring.RingStrategy"
        and strategy.start_method == "popen"
        and type(devices) is int
        and devices > 1
        and config.trainer.num_nodes == 1
        and is_typed()
    ):
        with script_job(devices, use_mpi=strategy.backend in ("auto", "mpi")) as job:
            raise JobFinished(job.run())


def is_typed() -> bool:
    """Whether this is the process that a person started, and no rank of anything."""
    return place() is None and "RING_LAUNCHER_PID" not in os.environ


# -- the folder of a run


def label(overrides: str) -> str:
    """``_`` and the overrides as part of a file name; nothing where there are none.

    Characters that a shell, a file system or Hydra treats specially become ``-``, also ``=`` and
    ``,``: the path of a checkpoint can be given back as it is.
    """
    name = re.sub(r"[^\w.+@-]+", "-", overrides, flags=re.ASCII)[:MOST_CHARACTERS]
    return f"_{name}" if name else ""


def rank_zero_folder(folder: str) -> str:
    """``folder`` on rank 0, as `new_folder` makes it; elsewhere a temporary one.

    Every rank that mpirun, srun or torchrun starts resolves ``${now:}`` for itself, and Hydra makes
    that folder before ranks can talk. Only rank 0's is used: it alone logs, and Lightning hands its
    checkpoint folder to the others.
    """
    if (place() or (0, 1))[0] == 0:
        return new_folder(folder)
    temporary = tempfile.mkdtemp(prefix="lightning-ring-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary


def new_folder(folder: str) -> str:
    """Make ``folder``, or ``folder_2`` and so on: runs can start in the same second.

    For ``logs/NAME/RUN``, ``latest/NAME`` leads there. Among the logs a link would be a second run
    to TensorBoard.
    """
    for number in itertools.count(1):
        path = Path(folder if number == 1 else f"{folder}_{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:
            return str(path)  # Hydra makes it again, and its error is reported
        # Two runs that start at once may both replace the link; a file system may have none.
        with contextlib.suppress(OSError):
            link = path.parents[2] / "latest" / path.parent.name
            link.parent.mkdir(exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(Path("..", *path.parts[-3:]))
        return str(path)
    raise AssertionError
