"""Sample and batch transforms whose random numbers depend on a seed alone."""

from __future__ import annotations

import copy
import pickle
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
_DRAWING = {getattr(torch, name) for name in _FUNCTIONS.split()}
_DRAWING |= {getattr(Tensor, name) for name in _METHODS.split()}


class OwnGenerator(TorchFunctionMode):
    """Inside it, torch's functions draw from `generator` if given none, in this thread only.

    Torch's own generator is shared by all threads, and ``torch.random.fork_rng`` changes it too.
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
    return {
        "Python's random": random.getstate(),
        "numpy.random": pickle.dumps(np.random.get_state()),
        "torch's own generator": torch.get_rng_state().numpy().tobytes(),
    }


class _OfThread(threading.local):
    """This thread's copy of a transform, and its generator."""

    def __init__(self, transform: Transform) -> None:
        self.transform: Any = copy.deepcopy(transform)
        self.draws = OwnGenerator()


class SampleTransforms:
    """Changes images in place; what ``transform`` draws depends on each image's seed.

    Each thread has a copy, because transforms may keep what they have drawn.

    Raises:
        ConfigurationError: On trial images of ``size`` it draws from a generator that all threads
            share, or it cannot be copied, or seeded for each image.
    """

    def __init__(self, transform: Transform, size: tuple[int, int]) -> None:
        kinds = type(transform).__mro__
        self._takes_arrays = any(kind.__module__.startswith("albumentations") for kind in kinds)
        self._name = f"sample_transform {name_of(transform)}"
        if self._takes_arrays and not hasattr(transform, "set_random_state"):
            raise ConfigurationError(
                f"{self._name} has no set_random_state, so it cannot be seeded for each image. "
                "Install Albumentations 2 or newer."
            )
        try:
            self._of_thread = _OfThread(transform)
        except (TypeError, NotImplementedError) as error:
            raise ConfigurationError(
                f"{self._name} cannot be copied for each thread: {error}. Give it a __deepcopy__."
            ) from error
        self._try(size)

    def _try(self, size: tuple[int, int]) -> None:
        restore, before = remember_random_state(), _states()
        try:
            for seed in range(_TRIALS):
                noise = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
                # noise may not suit it
                with suppress(SampleError):
                    self.run(torch.from_numpy(noise).permute(2, 0, 1), seed)
            used = [name for name, state in _states().items() if state != before[name]]
        finally:
            restore()
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
            SampleError: The transform raised, or did not return such an image.
        """
        try:
            made = self._made(image, seed)
        except Exception as error:
            raise SampleError(f"{self._name} raised {error!r}") from error
        found, expected = _described(made), _described(image)
        if found != expected:
            raise SampleError(
                f"{self._name} made {found}, expected {expected} as it got. `crop` sets the size; "
                "`transform`, which runs after it, makes floats and normalises.",
            )
        if made is not image:
            image.copy_(made.clone())  # it may be a view of the image

    def _made(self, image: Tensor, seed: int) -> Any:
        transform, draws = self._of_thread.transform, self._of_thread.draws
        if not self._takes_arrays:
            draws.generator.manual_seed(seed)
            with draws:
                return transform(image)
        # with set_random_seed, each part of a Compose would draw the same numbers
        transform.set_random_state(np.random.default_rng(seed), random.Random(seed))
        made = transform(image=image.permute(1, 2, 0).numpy())["image"]
        if isinstance(made, np.ndarray):
            made = torch.from_numpy(np.ascontiguousarray(made)).permute(2, 0, 1)
        return made


def name_of(transform: object) -> str:
    return getattr(transform, "__qualname__", type(transform).__name__)


def _described(made: object) -> str:
    if not isinstance(made, Tensor):
        return f"a {type(made).__name__}"
    return f"{' x '.join(map(str, made.shape))} of {str(made.dtype).removeprefix('torch.')}"


def transform_batch(
    transform: Transform, images: Tensor, labels: Tensor, seed: int
) -> tuple[Tensor, Tensor]:
    """``transform(images, labels)``, with the process's generators seeded by ``seed``.

    Python's, NumPy's, torch's and every GPU's generators are restored afterwards.

    Args:
        images: batch x 3 x height x width, on the device.
        labels: batch, integers.

    Raises:
        ConfigurationError: It did not return images and labels of as many samples.
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
