"""Every rank's random state, for checkpoints that resume exactly."""

from __future__ import annotations

import random
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_ring.comm.communicator import Communicator

_CHECKPOINT_KEY = "lightning_ring"


class RandomStates:
    """Carries the ranks' random states into a checkpoint, and out of one."""

    def __init__(self) -> None:
        self._loaded: list[dict[str, Any]] | None = None

    def save(self, checkpoint: dict[str, Any], comm: Communicator | None) -> None:
        """Add every rank's state to rank 0's ``checkpoint``; this rank's alone without ``comm``. Collective with it."""
        state = collect_random_state()
        states = comm.all_gather_object(state) if comm is not None else [state]
        if "optimizer_states" in checkpoint:  # not in one that holds weights only
            checkpoint[_CHECKPOINT_KEY] = {"random_states": states}

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Keep the states in ``checkpoint`` until `restore`."""
        self._loaded = checkpoint.get(_CHECKPOINT_KEY, {}).get("random_states")

    def restore(self, rank: int, world_size: int) -> None:
        """Continue where ``rank`` was when the checkpoint was saved; warns where there is no such rank."""
        states, self._loaded = self._loaded, None
        if states is None:
            return
        if len(states) != world_size:
            rank_zero_warn(
                f"lightning_ring: the checkpoint holds the random states of {len(states)} ranks, this job has "
                f"{world_size}. They are not restored: dropout and augmentation draw other numbers than they would "
                "have without the interruption."
            )
            return
        restore_random_state(states[rank])


def collect_random_state() -> dict[str, Any]:
    """State of Python's, NumPy's and torch's generators (every CUDA device's too), picklable with ``weights_only``."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(internal), gauss], "torch": torch.get_rng_state()}
    if numpy := _numpy_random():
        name, keys, position, has_gauss, cached = numpy.get_state()
        state["numpy"] = [name, keys.tolist(), int(position), int(has_gauss), float(cached)]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Undo what was drawn since `collect_random_state`. CUDA states are restored for as many devices as there are."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"].cpu())
    if (numpy := _numpy_random()) and "numpy" in state:
        numpy.set_state(tuple(state["numpy"]))
    for index, cuda in enumerate(state.get("cuda", [])[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda.cpu(), index)


def _numpy_random() -> Any:
    try:
        import numpy.random
    except ImportError:
        return None
    return numpy.random
