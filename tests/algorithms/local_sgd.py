"""An algorithm from outside the package, as a user would write it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer

from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.comm.communicator import Communicator, ReduceOp


class LocalSGD(Algorithm):
    """Every rank steps by itself; every ``every`` steps parameters are averaged (Stich 2019)."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.num_steps = 0

    def attach(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        comm: Communicator,
        *_: Callable[[str], None],
    ) -> None:
        self.module, self.comm = module, comm

    def after_step(self, optimizer: Optimizer) -> None:
        self.num_steps += 1
        if self.num_steps % self.every == 0:
            flat = parameters_to_vector(self.module.parameters()).detach()
            self.comm.all_reduce_(flat, op=ReduceOp.AVG).wait()
            vector_to_parameters(flat, self.module.parameters())

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> str:
        self.num_steps = state["num_steps"]
        return ""
