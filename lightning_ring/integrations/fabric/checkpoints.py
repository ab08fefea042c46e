"""What a checkpoint of Fabric holds beside the user's state, and how an optimizer takes its
state from one.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from lightning_ring.algorithms.algorithm import Algorithm

# states of the algorithms (residuals), by the name of the module
ALGORITHM_KEY = "lightning_ring_algorithm"


class LoadedState:
    """Stands for ``optimizer`` while Fabric loads a checkpoint: ``algorithm`` cuts the state
    into shards.
    """

    def __init__(self, optimizer: Optimizer, algorithm: Algorithm) -> None:
        self._optimizer = optimizer
        self._algorithm = algorithm

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._algorithm.load_optimizer_state_dict(self._optimizer, state)
