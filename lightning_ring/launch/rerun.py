"""The command line that started this process, for ranks to run again."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lightning_ring.errors import ConfigurationError


@contextmanager
def own_command() -> Iterator[list[str]]:
    """``python [options] script arguments`` or ``python -m module arguments`` of this process.

    Under Hydra the arguments are replaced by this process's configuration, resolved, in a temporary
    file that lives as long as the context: a rank that composed it again would choose an output
    folder of its own, and one that was started with ``-m a=1,2`` would run the whole sweep.
    """
    sys.stdout.flush()  # before the ranks write to the same place
    sys.stderr.flush()
    # the options that multiprocessing gives its own children: -W, -X, -O, -E, ...
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    python, script = [sys.executable, *options], _script()
    config = _hydra_config()
    if config is None:
        yield [*python, *script, *sys.argv[1:]]
        return
    with tempfile.NamedTemporaryFile(prefix="lightning_ring_", suffix=".pickle") as file:
        pickle.dump(config, file)
        file.flush()
        # Hydra warns once a rank that the option takes the place of all others, as it should here
        warning = "ignore:Experimental rerun CLI option"
        yield [*python, "-W", warning, *script, "--experimental-rerun", file.name]


def _script() -> list[str]:
    import __main__

    spec = getattr(__main__, "__spec__", None)
    if spec is not None:  # python -m
        return ["-m", spec.name.removesuffix(".__main__")]
    file = getattr(__main__, "__file__", None)
    if file is None or not os.path.exists(file):
        raise ConfigurationError(
            "Ranks are started by running this script again, and there is none: this is an "
            "interactive session or `python -c`. Write a script, use "
            "RingStrategy(start_method='fork') in a notebook, or start with mpirun."
        )
    return [os.path.abspath(file)]


def _hydra_config() -> Any:
    """The resolved configuration of the Hydra job that runs now, its ``hydra`` node included, or
    ``None``.

    Only Hydra's own frame still has what it handed to this process's main function. The saved
    ``.hydra/config.yaml`` is not the same: it may be switched off, and it loses enums and
    dataclasses.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        where = frame.f_globals.get("__name__"), frame.f_code.co_name
        if where == ("hydra.core.utils", "run_job"):
            break
        frame = frame.f_back
    else:
        return None
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf, open_dict, read_write

    config = copy.deepcopy(frame.f_locals["task_cfg"])
    OmegaConf.resolve(config)  # here, while ${hydra:...} and ${now:...} mean this job's
    with read_write(config), open_dict(config):
        config.hydra = HydraConfig.get()
    return config
