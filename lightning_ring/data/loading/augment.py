"""Transforms of torchvision, kornia, Albumentations and yours, with random numbers that depend
on a seed alone.
"""

from __future__ import annotations

import copy
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pickle import PicklingError
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_ring.errors import ConfigurationError, SampleError
from lightning_ring.host.random_state import remember_random_state

Transform = Callable[..., Any]
_TRIALS = 8
_PATIENCE = 5.0  # seconds, for an image that is being transformed at the end
_LEFT_TO_THE_RANK = "SIGINT SIGTERM SIGHUP SIGUSR1 SIGUSR2"

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


def seed_process(seed: int) -> None:
    """Seed the generators of this process (``seed`` < 2^32): Python's, NumPy's and torch's,
    those of GPUs not.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


def _states() -> dict[str, Any]:
    numpy: Any = np.random.get_state()
    return {
        "Python's random": random.getstate(),
        "numpy.random": (numpy[1].tobytes(), *numpy[2:]),
        "torch's own generator": torch.get_rng_state().numpy().tobytes(),
    }


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
        restore, before = remember_random_state(), _states()
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
            used = [name for name, state in _states().items() if state != before[name]]
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


class InProcesses:
    """``num`` processes, one for each thread that decodes; they start with the first batch, as
    `DataLoader`'s do.

    Each has an interpreter and random generators of its own. Images travel through shared memory
    that has no name: through the pipe they cost 0.3 ms each. A process ends with this object, or
    with its rank, however that ends.

    Args:
        num: Threads that call `run` at a time.
        images: That one call of `run` hands over, at most.
    """

    def __init__(self, transform: Transform, num: int, images: int) -> None:
        self.transform = transform
        self.num = num
        self.images = images
        self.processes: list[tuple[Any, Connection, Tensor]] = []
        self._idle: SimpleQueue[tuple[Any, Connection, Tensor]] = SimpleQueue()

    def begin(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Start the processes, in the thread that takes batches: no thread of the loader runs yet.

        Raises:
            ConfigurationError: The transform cannot be sent to a process.
        """
        if self.processes:
            return
        SeededTransform(self.transform)  # its errors come here, not from the processes
        # before multiprocessing waits for its children
        Finalize(self, _end, args=(self.processes,), exitpriority=10)
        context = multiprocessing.get_context()
        num_bytes = self.images * max(3 * height * width for height, width in sizes)
        for _ in range(self.num):
            mine, theirs = context.Pipe()
            memory = torch.empty(num_bytes, dtype=torch.uint8).share_memory_()
            process: Any = context.Process(
                target=_serve, args=(theirs, mine, memory, self.transform), daemon=True
            )
            try:
                process.start()
            # where processes are not forked
            except (AttributeError, PicklingError, TypeError) as error:
                raise ConfigurationError(
                    f"sample_transform {name_of(self.transform)} cannot be sent to a process: "
                    f"{error}. Define it at the top level of a module, or give in_processes=False."
                ) from error
            finally:
                theirs.close()
            self.processes.append((process, mine, memory))
            self._idle.put((process, mine, memory))

    def run(self, images: Sequence[Tensor], seeds: Sequence[int]) -> None:
        process, connection, memory = taken = self._idle.get()
        shared = _images_in(memory, len(images), images[0].shape)
        try:
            for mine, image in zip(shared, images, strict=True):
                mine.copy_(image)
            connection.send((images[0].shape, seeds))
            if (failed := connection.recv()) is not None:
                raise failed
            for mine, image in zip(shared, images, strict=True):
                image.copy_(mine)
        except (EOFError, OSError) as error:
            process.join(_PATIENCE)
            raise SampleError(
                f"a process that ran sample_transform {name_of(self.transform)} ended with exit "
                f"code {process.exitcode}. -9 is often the machine's memory running out: use "
                "fewer num_threads."
            ) from error
        finally:
            self._idle.put(taken)


def _images_in(memory: Tensor, num: int, shape: Sequence[int]) -> Tensor:
    """``num`` images at the start of ``memory``, each ``shape`` (3 x height x width), channels
    last.
    """
    _, height, width = shape
    rows = memory[: num * 3 * height * width].view(num, height, width, 3)
    return rows.permute(0, 3, 1, 2)


def _serve(
    connection: Connection, of_the_rank: Connection, memory: Tensor, transform: Transform
) -> None:
    """Run ``transform`` until the rank says so, or is gone."""
    of_the_rank.close()  # else this process would keep its own connection open
    for name in _LEFT_TO_THE_RANK.split():  # which may want to save a checkpoint first
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    torch.set_num_threads(1)
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(1)
    seeded = _SeededProcess(transform)
    with suppress(EOFError, OSError), torch.inference_mode():
        while (request := connection.recv()) is not None:
            shape, seeds = request
            try:
                seeded.run(list(_images_in(memory, len(seeds), shape)), seeds)
                connection.send(None)
            except TransformFailedError as failed:
                if failed.__cause__ is not None:
                    failed.reason += "\n" + "".join(traceback.format_exception(failed.__cause__))
                connection.send(TransformFailedError(failed.place, failed.reason))


class _SeededProcess(SeededTransform):
    """Seeds the generators of the whole process too, which belongs to the transform."""

    def _made(self, image: Tensor, seed: int) -> Tensor:
        seed_process(seed)
        return super()._made(image, seed)


def _end(processes: list[tuple[Any, Connection, Tensor]]) -> None:
    for _, connection, _ in processes:
        with suppress(OSError):  # it has ended
            connection.send(None)
        connection.close()
    for process, *_ in processes:
        process.join(_PATIENCE)
        if process.is_alive():
            process.kill()
            process.join()


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
        seed_process(seed)
        torch.manual_seed(seed)  # of GPUs too
        with torch.no_grad():
            made = transform(images, labels)
    finally:
        restore()
    num, found = len(images), f"a {type(made).__name__}"
    if isinstance(made, tuple | list) and [isinstance(part, Tensor) for part in made] == [True] * 2:
        if len(made[0]) == len(made[1]) == num:
            return made[0], made[1]
        found = f"{len(made[0])} images and {len(made[1])} labels"
    raise ConfigurationError(
        f"batch_transform {name_of(transform)} made {found} of {num} images and labels, expected "
        "(images, labels), as many as it got. A transform of images alone fits as lambda images, "
        "labels: (transform(images), labels)."
    )
