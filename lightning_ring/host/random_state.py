"""The state of all random generators of a process: Python's, NumPy's, torch's, and every CUDA device's."""

from __future__ import annotations

import random
from typing import Any

import torch


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
