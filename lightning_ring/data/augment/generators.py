"""Random numbers for transforms that know no generator but those that a whole process shares."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NAMES = (
    *(
        "bernoulli",
        "binomial",
        "multinomial",
        "normal",
        "poisson",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
    ),
    *("randn", "randn_like", "randperm", "_sample_dirichlet", "_standard_gamma"),
)
_METHODS = (
    *(
        "bernoulli",
        "bernoulli_",
        "cauchy_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "multinomial",
        "normal_",
    ),
    *("random_", "uniform_"),
)
_DRAWING = frozenset(
    [getattr(torch, name) for name in _NAMES] + [getattr(Tensor, name) for name in _METHODS]
)


class OwnGenerator(TorchFunctionMode):
    """Inside it, torch's functions draw from `generator` wherever they are given none, in this
    thread only.

    Torch's own generator is of the whole process: threads that seeded it would change each other's
    numbers, and those of the training. ``torch.random.fork_rng`` changes it too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWING and kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": self.generator}
        return func(*args, **kwargs)


def seed_process(seed: int) -> None:
    """Seed the generators of this process (``seed`` < 2^32): Python's, NumPy's and torch's,
    those of GPUs not.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


class SharedGenerators:
    """What the generators of the whole process hold, so that a later `used` can say which of
    them were drawn from.
    """

    def __init__(self) -> None:
        self._states = _states()

    def used(self) -> list[str]:
        return [name for name, state in _states().items() if state != self._states[name]]


def _states() -> dict[str, Any]:
    numpy: Any = np.random.get_state()
    return {
        "Python's random": random.getstate(),
        "numpy.random": (numpy[1].tobytes(), *numpy[2:]),
        "torch's own generator": torch.get_rng_state().numpy().tobytes(),
    }
