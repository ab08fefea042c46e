"""The state of all random generators of a process: Python's, NumPy's, torch's, and every GPU's."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor

from lightning_ring.host.accelerator import COLLECTIVES, gpu_module


def collect_random_state() -> dict[str, Any]:
    """State of Python's, NumPy's and torch's generators (every GPU's too), picklable with
    ``weights_only``.
    """
    state = _random_state()
    name, keys, *rest = state["numpy"]
    return state | {"numpy": [name, keys.tolist(), *rest]}


def restore_random_state(state: dict[str, Any]) -> None:
    """Undo what was drawn since `collect_random_state`. GPUs' states are restored for as many as
    there are.
    """
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(own_memory(state["torch"]))
    numpy.random.set_state(tuple(state["numpy"]))
    for kind in COLLECTIVES.keys() & state.keys():
        gpus = gpu_module(torch.device(kind))
        for index, of_one in enumerate(state[kind][: gpus.device_count()]):
            gpus.set_rng_state(own_memory(of_one), index)


def own_memory(state: Tensor) -> Tensor:
    """``state`` as torch's ``set_state`` needs it: on the host, at the start of its memory.

    Of a view it reads where the whole memory begins: it would take another rank's state, or end the
    process.
    """
    return state.cpu().clone()


def remember_random_state() -> Callable[[], None]:
    """Keep the states of the same generators as they are, which is cheaper; the returned
    function restores them.
    """
    return partial(restore_random_state, _random_state())


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "numpy": numpy.random.get_state(),
    }
    for kind in COLLECTIVES:
        gpus = gpu_module(torch.device(kind))
        # a flag first: the other question may reach a driver
        if gpus.is_initialized() and gpus.is_available():
            state[kind] = gpus.get_rng_state_all()
    return state
