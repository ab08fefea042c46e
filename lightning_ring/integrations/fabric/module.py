"""The module that Fabric calls, and the pause of averaging that Fabric asks for."""

from __future__ import annotations

import copy
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn

from lightning_ring.loops.replicas import Replicas


class RingModule(nn.Module):
    """``module`` as Fabric calls it, as DistributedDataParallel would be: Fabric leads methods that
    are marked as forward methods through it, in the precision of the training. Its replicas last as
    long as it does.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self.module, memo)  # a copy trains alone

    def follow(self, replicas: Replicas) -> None:
        object.__setattr__(self, "replicas", replicas)  # Replicas is no part of the module's state
        weakref.finalize(self, replicas.remove, wait=False).atexit = False


class BackwardSyncControl(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if not enabled:
            return nullcontext()
        if not isinstance(module, RingModule):
            raise TypeError(
                "Blocking backward sync is only possible if the module passed to "
                "`fabric.no_backward_sync` was set up by `fabric.setup`. Got: "
                f"{type(module).__name__}."
            )
        return module.replicas.no_sync()  # type: ignore[union-attr, operator]
