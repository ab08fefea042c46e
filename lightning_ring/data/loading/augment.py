"""Transforms of torchvision, kornia, Albumentations and yours, with random numbers that depend
on a seed alone.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_ring.errors import ConfigurationError, SampleError
from lightning_ring.host.random_state import remember_random_state

Transform = Callable[..., Any]
_TRIALS = 8

_FUNCTIONS = (
    "bernoulli binomial multinomial normal poisson rand rand_like randint randint_like randn "
    "randn_like randperm _sample_dirichlet _standard_gamma"
)
_METHODS = (
    "bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal_ random_ "
    "uniform_"
)
_DRAWING = frozenset(
    [getattr(torch, name) for name in _FUNCTIONS.split()]
    + [getattr(Tensor, name) for name in _METHODS.split()]
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


def _states() -> dict[str, Any]:
    numpy: Any = np.random.get_state()
    return {
        "Python's random": random.getstate(),
        "numpy.random": (numpy[1].tobytes(), *numpy[2:]),
        "torch's own generator": torch.get_rng_state().numpy().tobytes(),
    }


class SampleTransforms:
    """Changes images in place; what ``transform`` draws depends on each image's seed.

    Each thread has a copy of it, for transforms that keep what they have drawn. Torch draws from a
    generator of the thread, transforms of Albumentations from one of their own.
    """

    def __init__(self, transform: Transform) -> None:
        self.transform = transform
        self._takes_arrays = _is_of_albumentations(transform)
        self._name = f"sample_transform {name_of(transform)}"
        self._of_thread = threading.local()
        self._begun = False

    def begin(self, size: tuple[int, int]) -> None:
        """Try the transform on noise of height and width ``size``; called by the thread that takes
        batches, before the first image.

        Raises:
            ConfigurationError: It draws from a generator that all threads share, or cannot be
                seeded for each image.
        """
        if self._begun:
            return
        self._begun = True
        if self._takes_arrays and not hasattr(self.transform, "set_random_state"):
            raise ConfigurationError(
                f"{self._name} has no set_random_state, so it cannot be seeded for each image. "
                "Install Albumentations 2 or newer."
            )
        restore, before = remember_random_state(), _states()
        try:
            for seed in range(_TRIALS):
                noise = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
                # if it fails on an image too, its error names that
                with suppress(SampleError):
                    self.run(torch.from_numpy(noise).permute(2, 0, 1), seed)
            used = [name for name, state in _states().items() if state != before[name]]
        finally:
            restore()
            self._of_thread = threading.local()
        if used:
            raise ConfigurationError(
                f"{self._name} draws from {' and '.join(used)}, which all threads share: its "
                "pictures would be others each time. Draw with functions of torch that take a "
                "generator, such as torch.rand, or give it to ShardDataset(..., transform=) and "
                "torch's DataLoader, which has processes."
            )

    def run(self, image: Tensor, seed: int) -> None:
        """``image``: 3 x height x width, uint8; ``seed``: below 2^32.

        Raises:
            SampleError: The transform raised an error, or made something else than such an image.
        """
        transform, draws = self._mine()
        try:
            made = self._made(transform, draws, image, seed)
        except Exception as error:
            raise SampleError(f"{self._name} raised {error!r}") from error
        if made.shape != image.shape or made.dtype != image.dtype:
            raise SampleError(
                f"{self._name} made {_described(made)}, expected {_described(image)} as it got. "
                "`crop` sets the size; `transform`, which runs after it, makes floats and "
                "normalises.",
            )
        if made is not image:
            image.copy_(made)

    def _mine(self) -> tuple[Any, OwnGenerator]:
        """This thread's transform and generator."""
        if not hasattr(self._of_thread, "mine"):
            try:
                self._of_thread.mine = copy.deepcopy(self.transform), OwnGenerator()
            except (TypeError, NotImplementedError) as error:
                raise ConfigurationError(
                    f"{self._name} cannot be copied for each thread: {error}. Give it a "
                    "__deepcopy__."
                ) from error
        mine: tuple[Any, OwnGenerator] = self._of_thread.mine
        return mine

    def _made(self, transform: Any, draws: OwnGenerator, image: Tensor, seed: int) -> Tensor:
        if self._takes_arrays:
            # not set_random_seed, with which each part of a Compose draws the same numbers
            transform.set_random_state(np.random.default_rng(seed), random.Random(seed))
            made = transform(image=image.permute(1, 2, 0).numpy())["image"]
            if isinstance(made, np.ndarray):
                made = torch.from_numpy(np.ascontiguousarray(made)).permute(2, 0, 1)
        else:
            draws.generator.manual_seed(seed)
            with draws:
                made = transform(image)
        if not isinstance(made, Tensor):
            raise TypeError(
                f"it gave a {type(made).__name__}, expected a tensor 3 x height x width of uint8"
            )
        memory, own = made.untyped_storage().data_ptr(), image.untyped_storage().data_ptr()
        is_view = made is not image and memory == own  # turned or mirrored
        return made.clone() if is_view else made


def name_of(transform: object) -> str:
    return getattr(transform, "__qualname__", type(transform).__name__)


def _is_of_albumentations(transform: object) -> bool:
    return any(
        kind.__module__.partition(".")[0] == "albumentations" for kind in type(transform).__mro__
    )


def _described(image: Tensor) -> str:
    return f"{' x '.join(map(str, image.shape))} of {str(image.dtype).removeprefix('torch.')}"


def transform_batch(
    transform: Transform, images: Tensor, labels: Tensor, seed: int
) -> tuple[Tensor, Tensor]:
    """``transform(images, labels)``, which draws from the process's generators as ``seed`` says.

    They are as before when it returns: Python's, NumPy's, torch's, and every GPU's.

    Args:
        images: batch x 3 x height x width, on the device.
        labels: batch, integers.

    Raises:
        ConfigurationError: It made no images and labels of as many samples.
    """
    restore = remember_random_state()
    try:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)  # of GPUs too
        with torch.no_grad():
            made = transform(images, labels)
    finally:
        restore()
    found = f"a {type(made).__name__}"
    if isinstance(made, tuple | list):
        found = " and ".join(f"{len(part)}" for part in made if isinstance(part, Tensor))
    if found == f"{len(images)} and {len(images)}":
        return made[0], made[1]
    raise ConfigurationError(
        f"batch_transform {name_of(transform)} made {found} of {len(images)} images and labels, "
        "expected (images, labels), as many as it got. A transform of images alone fits as lambda "
        "images, labels: (transform(images), labels)."
    )
