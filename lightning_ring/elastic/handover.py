"""The state of a training, from a rank that has it to all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.replicate import (
    broadcast_module,
    broadcast_optimizer_state,
    check_same_model,
)


class Stateful(Protocol):
    """A part with state beside module and optimizers: a learning rate schedule, a loss scaler,
    counters.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


def hand_over(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    parts: Mapping[str, Stateful],
    comm: Communicator,
    *,
    receives: bool,
) -> None:
    """Replace module, optimizer state, and where a rank ``receives`` also ``parts``, by rank 0's.
    Collective.

    A rank that has state already gets the same values again.

    Raises:
        ModelMismatchError: The ranks' models or optimizers differ.
    """
    check_same_model(module, comm)
    broadcast_module(module, comm)
    for optimizer in optimizers:
        broadcast_optimizer_state(optimizer, comm)
    states = {name: part.state_dict() for name, part in parts.items()} if comm.rank == 0 else None
    states = comm.broadcast_object(states)
    assert states is not None
    if receives:
        for name, part in parts.items():
            part.load_state_dict(states[name])
