"""Runs a script or a module as ``python`` would, in which ``horovod`` is this package."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

from lightning_ring.errors import RankDiscoveryError
from lightning_ring.job.exit import say
from lightning_ring.job.launchers import launcher_variables

_OURS = "lightning_ring.horovod"
# Horovod's modules and ours
_MODULES = {
    "horovod.common": None,
    "horovod.common.basics": f"{_OURS}.builds",
    "horovod.common.elastic": f"{_OURS}.elastic",
    "horovod.common.exceptions": "lightning_ring.errors",
    "horovod.common.process_sets": f"{_OURS}.context",
    "horovod.common.util": f"{_OURS}.builds",
    "horovod.torch": _OURS,
    "horovod.torch.compression": f"{_OURS}.compression",
    "horovod.torch.elastic": f"{_OURS}.elastic",
    "horovod.torch.elastic.sampler": f"{_OURS}.elastic.sampler",
    "horovod.torch.elastic.state": f"{_OURS}.elastic.state",
    "horovod.torch.functions": f"{_OURS}.functions",
    "horovod.torch.mpi_ops": _OURS,
    "horovod.torch.optimizer": f"{_OURS}.optimizer",
    "horovod.torch.sync_batch_norm": f"{_OURS}.sync_batch_norm",
}
_ON_PATH = str(Path(__file__).with_name("on_path"))
_USAGE = (
    "usage: python -m lightning_ring.horovod SCRIPT.py [ARGUMENT ...]\n       ... -m MODULE "
    "[ARGUMENT ...]"
)


def main(arguments: Sequence[str]) -> int:
    """Run ``arguments``: a script, or ``-m`` and a module, with arguments. Returns an exit code."""
    if not arguments or arguments[0] in ("-h", "--help") or list(arguments) == ["-m"]:
        print(_USAGE, file=sys.stderr if not arguments else sys.stdout)
        return 2 if not arguments else 0
    _say_which()
    _put_on_path()
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        script = os.path.abspath(arguments[0])
        if not os.path.exists(script):
            say(f"{arguments[0]}: there is no such file. {_USAGE}")
            return 2
        if not getattr(sys.flags, "safe_path", False):  # python -P
            sys.path[0] = os.path.dirname(os.path.realpath(script))
        sys.argv = list(arguments)
        runpy.run_path(script, run_name="__main__")
    return 0


def _put_on_path() -> None:
    """Have ``import horovod`` lead here, in this process and its children."""
    others = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([_ON_PATH, *others]))
    sys.path.insert(0, _ON_PATH)
    import horovod  # noqa: F401  (before a folder of that name beside the script is found)

    # `multiprocessing` hands sys.path on
    sys.path.insert(1, sys.path.pop(0))


def _say_which() -> None:
    try:
        launched = launcher_variables(os.environ)
    except RankDiscoveryError:
        return  # `init` says it
    if launched is not None and launched.rank != 0:
        return
    try:
        other = f"; the installed horovod {version('horovod')} is not used"
    except PackageNotFoundError:
        other = ""
    say(f"`import horovod` gives lightning_ring.horovod{other}")


class Names(MetaPathFinder, Loader):
    """Imports of Horovod's modules give ours; the others fail."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("horovod."):
            return None
        if fullname not in _MODULES:
            raise ModuleNotFoundError(
                f"lightning_ring has Horovod's API for PyTorch, horovod.torch, and no {fullname}. "
                "Its guide 'From Horovod' says what takes the place of the rest.",
                name=fullname,
            )
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        ours = _MODULES[module.__name__]
        if ours is not None:
            # the import system takes what it finds there
            sys.modules[module.__name__] = import_module(ours)
