"""Processes that run transforms of images: each has an interpreter and random generators of its
own.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pickle import PicklingError
from queue import SimpleQueue
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

from lightning_ring.data.augment.generators import seed_process
from lightning_ring.data.augment.sample import (
    SeededTransform,
    Transform,
    TransformFailedError,
    name_of,
)
from lightning_ring.errors import ConfigurationError, SampleError

_PATIENCE = 5.0  # seconds, for an image that is being transformed at the end
_LEFT_TO_THE_RANK = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")


class InProcesses:
    """``num`` processes, one for each thread that decodes; they start with the first batch, as
    `DataLoader`'s do.

    Images travel through shared memory that has no name. A process ends with this object, or with
    its rank, however that ends.

    Args:
        num: Threads that call `run` at a time.
        images: That one call of `run` hands over, at most.
    """

    def __init__(self, transform: Transform, num: int, images: int) -> None:
        self.transform = transform
        self.num = num
        self.images = images
        self.processes: list[_Process] = []
        self._idle: SimpleQueue[_Process] = SimpleQueue()

    def begin(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Start the processes, in the thread that takes batches: no thread of the loader runs yet.

        Raises:
            ConfigurationError: The transform cannot be sent to a process.
        """
        if self.processes:
            return
        SeededTransform(self.transform)  # its errors come here, not from the processes
        num_bytes = self.images * max(3 * height * width for height, width in sizes)
        # before multiprocessing waits for its children
        Finalize(self, _end, args=(self.processes,), exitpriority=10)
        for _ in range(self.num):
            process = _Process(self.transform, num_bytes)
            self.processes.append(process)
            self._idle.put(process)

    def run(self, images: Sequence[Tensor], seeds: Sequence[int]) -> None:
        process = self._idle.get()
        try:
            process.run(images, seeds)
        finally:
            self._idle.put(process)


class _Process:
    def __init__(self, transform: Transform, num_bytes: int) -> None:
        self.transform = transform
        self.memory = torch.empty(num_bytes, dtype=torch.uint8).share_memory_()
        context = multiprocessing.get_context()
        self.connection, theirs = context.Pipe()
        self.process: Any = context.Process(
            target=_serve,
            args=(theirs, self.connection, self.memory, transform),
            name="ring-transform",
            daemon=True,
        )
        try:
            self.process.start()
        # where processes are not forked
        except (AttributeError, PicklingError, TypeError) as error:
            raise ConfigurationError(
                f"sample_transform {name_of(transform)} cannot be sent to a process: {error}. "
                "Define it at the top level of a module, or give in_processes=False."
            ) from error
        finally:
            theirs.close()

    def run(self, images: Sequence[Tensor], seeds: Sequence[int]) -> None:
        shared = _images(self.memory, len(images), images[0].shape)
        for mine, image in zip(shared, images, strict=True):
            mine.copy_(image)
        try:
            self.connection.send((images[0].shape, seeds))
            failed = self.connection.recv()
        except (EOFError, OSError) as error:
            self.process.join(_PATIENCE)
            raise SampleError(
                f"a process that ran sample_transform {name_of(self.transform)} ended with exit "
                f"code {self.process.exitcode}. -9 is often the machine's memory running out: use "
                "fewer num_threads."
            ) from error
        if failed is not None:
            raise failed
        for mine, image in zip(shared, images, strict=True):
            image.copy_(mine)


def _images(memory: Tensor, num: int, shape: Sequence[int]) -> list[Tensor]:
    """``num`` images at the start of ``memory``, each ``shape`` (3 x height x width), channels
    last.
    """
    _, height, width = shape
    rows = memory[: num * 3 * height * width].view(num, height, width, 3)
    return list(rows.permute(0, 3, 1, 2))


def _serve(
    connection: Connection, of_the_rank: Connection, memory: Tensor, transform: Transform
) -> None:
    """Run ``transform`` until the rank says so, or is gone."""
    of_the_rank.close()  # else this process would keep its own connection open
    for name in _LEFT_TO_THE_RANK:  # which may want to save a checkpoint first
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    torch.set_num_threads(1)
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(1)
    seeded = _SeededProcess(transform)
    while True:
        try:
            request = connection.recv()
        except (EOFError, OSError):
            return
        if request is None:
            return
        shape, seeds = request
        with torch.inference_mode():
            failed = _failure(seeded, _images(memory, len(seeds), shape), seeds)
        try:
            connection.send(failed)
        except OSError:
            return


class _SeededProcess(SeededTransform):
    """Seeds the generators of the whole process too, which belongs to the transform."""

    def _made(self, image: Tensor, seed: int) -> Tensor:
        seed_process(seed)
        return super()._made(image, seed)


def _failure(
    seeded: SeededTransform, images: list[Tensor], seeds: list[int]
) -> TransformFailedError | None:
    try:
        seeded.run(images, seeds)
    except TransformFailedError as failed:
        if failed.__cause__ is not None:
            failed.reason += "\n" + "".join(traceback.format_exception(failed.__cause__))
        return TransformFailedError(failed.place, failed.reason)
    return None


def _end(processes: list[_Process]) -> None:
    for process in processes:
        with suppress(OSError):  # it has ended
            process.connection.send(None)
        process.connection.close()
    for process in processes:
        process.process.join(_PATIENCE)
        if process.process.is_alive():
            process.process.kill()
            process.process.join()
