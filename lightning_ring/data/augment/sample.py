"""Transforms of one image."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_ring.data.augment.generators import OwnGenerator, SharedGenerators
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.random_state import remember_random_state

Transform = Callable[..., Any]
_TRIALS = 8


class TransformFailedError(Exception):
    """A transform failed on the image number ``place`` of those that it was given."""

    def __init__(self, place: int, reason: str) -> None:
        super().__init__(place, reason)
        self.place = place
        self.reason = reason


class SampleTransforms(Protocol):
    """Changes images in place: in the thread that calls, or in a process."""

    def begin(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Called by the thread that takes batches, before the first image; ``sizes``: heights
        and widths.
        """

    def run(self, images: Sequence[Tensor], seeds: Sequence[int]) -> None:
        """``images``: of one size, each 3 x height x width, uint8; ``seeds``: of each, below 2^32.

        Raises:
            TransformFailedError: The transform raised an error, or made something else than such an
                image.
        """


class InThreads:
    """Each thread has a copy of ``transform``, for transforms that keep what they have drawn."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform
        self._of_thread = threading.local()
        self._begun = False

    def begin(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Try the transform on noise.

        Raises:
            ConfigurationError: It draws from a generator that all threads share.
        """
        if self._begun:
            return
        self._begun = True
        restore, shared = remember_random_state(), SharedGenerators()
        try:
            tried = self._copy()
            for seed in range(_TRIALS):
                noise = np.random.default_rng(seed)
                for size in sizes:
                    image = torch.from_numpy(noise.integers(0, 256, (*size, 3), np.uint8)).permute(
                        2, 0, 1
                    )
                    # if it fails on an image too, its error names that
                    with suppress(TransformFailedError):
                        tried.run([image], [seed])
            used = shared.used()
        finally:
            restore()
        if used:
            raise ConfigurationError(
                f"sample_transform {name_of(self.transform)} draws from {' and '.join(used)}, "
                "which all threads share: its pictures would be others each time. Draw with "
                "functions of torch that take a generator, such as torch.rand, or give "
                "in_processes=True: each process has generators of its own."
            )

    def run(self, images: Sequence[Tensor], seeds: Sequence[int]) -> None:
        mine = getattr(self._of_thread, "transform", None)
        if mine is None:
            mine = self._of_thread.transform = self._copy()
        mine.run(images, seeds)

    def _copy(self) -> SeededTransform:
        try:
            return SeededTransform(copy.deepcopy(self.transform))
        except (TypeError, NotImplementedError) as error:
            raise ConfigurationError(
                f"sample_transform {name_of(self.transform)} cannot be copied for each thread: "
                f"{error}. Give it a __deepcopy__, or in_processes=True."
            ) from error


class SeededTransform:
    """Runs ``transform`` in one thread; what it draws depends on each image's seed.

    Torch draws from a generator of this thread, transforms of Albumentations from one of their own.
    """

    def __init__(self, transform: Transform) -> None:
        self.transform = transform
        self.takes_arrays = _is_of_albumentations(transform)
        if self.takes_arrays and not hasattr(transform, "set_random_state"):
            raise ConfigurationError(
                f"sample_transform {name_of(transform)} has no set_random_state, so it cannot be "
                "seeded for each image. Install Albumentations 2 or newer."
            )
        self._draws = OwnGenerator()

    def run(self, images: Sequence[Tensor], seeds: Sequence[int]) -> None:
        """As `SampleTransforms.run`."""
        for place, (image, seed) in enumerate(zip(images, seeds, strict=True)):
            try:
                made = self._made(image, seed)
            except Exception as error:
                reason = f"sample_transform {name_of(self.transform)} raised {error!r}"
                raise TransformFailedError(place, reason) from error
            if made.shape != image.shape or made.dtype != image.dtype:
                raise TransformFailedError(
                    place,
                    f"sample_transform {name_of(self.transform)} made {_described(made)}, "
                    f"expected {_described(image)} as it got. `crop` sets the size; `transform`, "
                    "which runs after it, makes floats and normalises.",
                )
            if made is not image:
                image.copy_(made)

    def _made(self, image: Tensor, seed: int) -> Tensor:
        if self.takes_arrays:
            transform: Any = self.transform
            # not set_random_seed, with which each part of a Compose draws the same numbers
            transform.set_random_state(np.random.default_rng(seed), random.Random(seed))
            made = transform(image=image.permute(1, 2, 0).numpy())["image"]
            if isinstance(made, np.ndarray):
                made = torch.from_numpy(np.ascontiguousarray(made)).permute(2, 0, 1)
        else:
            self._draws.generator.manual_seed(seed)
            with self._draws:
                made = self.transform(image)
        if not isinstance(made, Tensor):
            raise TypeError(
                f"it gave a {type(made).__name__}, expected a tensor 3 x height x width of uint8"
            )
        shares = (
            made is not image
            and made.untyped_storage().data_ptr() == image.untyped_storage().data_ptr()
        )
        return made.clone() if shares else made  # a view, turned or mirrored


def name_of(transform: object) -> str:
    return getattr(transform, "__qualname__", type(transform).__name__)


def _is_of_albumentations(transform: object) -> bool:
    return any(
        kind.__module__.partition(".")[0] == "albumentations" for kind in type(transform).__mro__
    )


def _described(image: Tensor) -> str:
    return f"{' x '.join(map(str, image.shape))} of {str(image.dtype).removeprefix('torch.')}"
