"""Which module of this package stands in the place of which of Horovod's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_OURS = "lightning_ring.horovod"
_MODULES = {
    "horovod.common": None,  # an empty package
    "horovod.common.basics": f"{_OURS}.builds",
    "horovod.common.elastic": f"{_OURS}.elastic",
    "horovod.common.exceptions": f"{_OURS}.errors",
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


def lead_names_here() -> None:
    """From here on imports of Horovod's modules give ours. Those that have no counterpart cannot
    be imported.
    """
    if not any(isinstance(finder, _Names) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Names())


class _Names(MetaPathFinder, Loader):
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
