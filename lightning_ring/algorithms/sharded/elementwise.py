"""Which optimizers are elementwise: the update of an element depends on no other element."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from lightning_ring.errors import ConfigurationError
from lightning_ring.optim import LAMB, LARS

_OF_TORCH = (
    "SGD",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
)
# The norms of LARS and LAMB are summed over ranks.
ELEMENTWISE = {getattr(torch.optim, name) for name in _OF_TORCH} | {LARS, LAMB}


def check_can_be_sharded(optimizer: Optimizer) -> None:
    """Check that ``optimizer`` can step this rank's part of each parameter.

    torch's own elementwise optimizers, LARS and LAMB are known. Any other class says so itself,
    with the attribute ``elementwise = True``.

    Raises:
        ConfigurationError: It is of another class.
    """
    kind, why = type(optimizer), ""
    if kind.__name__ == "_MockOptimizer":
        return  # Lightning's, of a module without optimizers. It steps nothing.
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        why = "it is no torch.optim.Optimizer, or does not call its constructor"
    elif kind not in ELEMENTWISE and not getattr(kind, "elementwise", False):
        why = (
            "it is not known to update each element by itself. If it does, and keeps all its "
            "tensors in its state, set `elementwise = True` on the class"
        )
    if why:
        raise ConfigurationError(
            f"{kind.__module__}.{kind.__qualname__} cannot be sharded over ranks: {why}. Or use "
            "strategy='ring', where every rank steps whole parameters."
        )
