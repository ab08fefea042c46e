"""The loader: threads fill the batches after the one that is trained on."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from itertools import islice
from time import perf_counter
from typing import Any, Protocol, TypedDict

import numpy as np
from torch.utils.data import default_collate
from typing_extensions import Unpack

from lightning_ring.data.sampling.sampler import Ints, OrderedSampler
from lightning_ring.errors import ConfigurationError, SampleError
from lightning_ring.host.cores import available_cores


@dataclass(slots=True)
class LoaderTimes:
    """Sums since the loader was built, in seconds by the clock.

    ``reading`` and ``transforming`` are added up over the threads, so both may grow faster than
    time passes; the others are of the thread that takes the batches.

    Attributes:
        batches, samples: Handed over so far.
        skipped: Samples among them that took the place of others (``on_error`` of `ImageBatches`).
        reading: Getting encoded images from files.
        transforming: Decoding, cropping and resizing; of a torch data set all of ``__getitem__``.
        collating: Making a batch out of the samples of a torch data set, in its thread.
        waiting: Time that the consumer waited for a batch that was not ready.
        copying: Handing the batch to the device and starting the work there (which CUDA may do
            later).
    """

    batches: int = 0
    samples: int = 0
    skipped: int = 0
    reading: float = 0.0
    transforming: float = 0.0
    collating: float = 0.0
    waiting: float = 0.0
    copying: float = 0.0

    def __iadd__(self, other: LoaderTimes) -> LoaderTimes:
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))
        return self


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of an epoch: their positions in the global order, and their indices in the data
    set.
    """

    seed: int
    epoch: int
    positions: Ints
    indices: Ints

    def __len__(self) -> int:
        return len(self.indices)

    def part(self, start: int, stop: int) -> Samples:
        return Samples(self.seed, self.epoch, self.positions[start:stop], self.indices[start:stop])


class BatchMaker(Protocol):
    """Makes batches: `fill` is called by threads of the loader, everything else by the thread
    that takes batches.
    """

    chunk: int | None  # samples that one call of `fill` takes; `None`: the whole batch
    ahead: bool  # whether to start batch n + 1, once it is filled, before handing over n

    def open(self, samples: Samples) -> Any:
        """Room for a batch of ``samples``."""

    def fill(self, room: Any, offset: int, samples: Samples) -> LoaderTimes:
        """Put ``samples`` into ``room`` from place ``offset`` on; returns the seconds that this
        took.

        Raises `SampleError`: one of them cannot be had.
        """

    def start(self, room: Any) -> Any:
        """Send a filled batch on its way to the device."""

    def finish(self, started: Any) -> Any:
        """The batch, which the caller may use at once."""


log = logging.getLogger(__name__)


class LoaderOptions(TypedDict, total=False):
    """What every loader takes, see `Loader`."""

    drop_last: bool
    num_threads: int | None
    ranks_per_node: int
    prefetch: int


@dataclass(slots=True)
class _Run:
    """One going through the loader: where it began, and how far it got."""

    began: dict[str, Any]  # the sampler's state
    batches_before: int
    place: tuple[int, int]  # rank and world size, which may change before it is saved
    batches: int = 0


class Loader:
    """Iterates over the batches of one rank: `image_loader` and `item_loader` build it.

    Threads start with the first batch and end with the last, with the iterator, or with an error,
    which is raised where the batch would have been handed over. Lightning takes it as it takes a
    DataLoader: it has a length, its sampler is told the epoch, and its state is saved with a
    checkpoint, so that training resumes at the next sample that it was not trained on, on any
    number of ranks.

    Args:
        drop_last: Leave out a last batch that is smaller.
        num_threads: That fill batches. Left out: the cores that this process may use, divided by
            ``ranks_per_node``.
        ranks_per_node: Ranks that share those cores.
        prefetch: Batches that are filled while one is trained on.

    Attributes:
        times: Where the time went, so far.
        images: Fingerprint of the images, where they have one: a state over other images is
            refused.
    """

    batch_sampler = None  # Lightning asks the loaders of an evaluation for it

    def __init__(
        self,
        maker: BatchMaker,
        sampler: OrderedSampler,
        batch_size: int | None = None,
        *,
        drop_last: bool = False,
        num_threads: int | None = None,
        ranks_per_node: int = 1,
        prefetch: int = 2,
        images: str | None = None,
    ) -> None:
        wanted = getattr(sampler, "batch_size", batch_size)
        if wanted is None or batch_size not in (None, wanted):
            raise ConfigurationError(
                f"batch_size={batch_size} was given with {type(sampler).__name__}, expected "
                f"{wanted or 'a number'}."
            )
        counts = {"batch_size": wanted, "num_threads": num_threads, "prefetch": prefetch}
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ConfigurationError(f"{name}={value} was given, expected at least 1.")
        self.maker = maker
        self.sampler = sampler
        self.batch_size = wanted
        self.drop_last = drop_last
        self.num_threads = num_threads or available_cores(ranks_per_node)
        # enough batches for all threads: each works on the parts of one
        parts = -(-wanted // maker.chunk) if maker.chunk else 1
        self.prefetch = max(prefetch, -(-self.num_threads // parts))
        self.times = LoaderTimes()
        self.images = images
        self._run: _Run | None = None
        self._resumed: dict[tuple[int, int], int] = {}  # epoch and position: batches before it

    # -- lengths

    def __len__(self) -> int:
        """Batches in this epoch, those before a resumed position included: so Lightning counts
        them.
        """
        return self._batches_before() + self._num_batches(self.sampler.position)

    def _num_batches(self, position: int) -> int:
        """From ``position`` to the end of the epoch."""
        samples = self.sampler.num_left(position)
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def _batches_before(self) -> int:
        return self._resumed.get((self.sampler.epoch, self.sampler.position), 0)

    # -- iteration

    def __iter__(self) -> Iterator[Any]:
        # looked at with the first batch: Lightning sets the epoch after it has called iter()
        run = self._run = self._run_from_here()
        pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="ring-loader")
        try:
            yield from self._batches(pool, run)
        finally:
            pool.shutdown(cancel_futures=True)

    def _run_from_here(self) -> _Run:
        sampler = self.sampler
        place = sampler.rank, sampler.num_replicas
        return _Run(sampler.state_dict(), self._batches_before(), place)

    def _batches(self, pool: ThreadPoolExecutor, run: _Run) -> Iterator[Any]:
        maker, submitted = self.maker, self._submitted(pool)
        filling = deque(islice(submitted, self.prefetch))
        started: deque[Any] = deque()
        while filling or started:
            if not started:
                started.append(self._start(filling.popleft()))
            began = perf_counter()
            batch, num = started.popleft()
            batch = maker.finish(batch)
            self.times += LoaderTimes(batches=1, samples=num, copying=perf_counter() - began)
            filling.extend(islice(submitted, self.prefetch - len(filling)))
            if maker.ahead and filling and all(future.done() for future in filling[0][1]):
                started.append(self._start(filling.popleft()))
            run.batches += 1
            if not filling and not started and self.sampler.epoch == run.began["epoch"]:
                # not later: Lightning asks for lengths, not for a batch after the last one
                self.sampler.rewind()
            yield batch

    def _submitted(
        self, pool: ThreadPoolExecutor
    ) -> Iterator[tuple[Any, list[Future[LoaderTimes]], int]]:
        maker = self.maker
        for samples in self._cut():
            room, size = maker.open(samples), maker.chunk or len(samples)
            futures = [
                pool.submit(maker.fill, room, start, samples.part(start, start + size))
                for start in range(0, len(samples), size)
            ]
            yield room, futures, len(samples)

    def _cut(self) -> Iterator[Samples]:
        """The sampler's blocks as batches."""
        sampler, size = self.sampler, self.batch_size
        seed, epoch = sampler.seed, sampler.epoch
        left = np.empty((2, 0), dtype=np.int64)  # positions, and indices
        for block in sampler.blocks():
            left = np.concatenate([left, np.stack(block)], axis=1)
            whole = left.shape[1] // size * size
            for start in range(0, whole, size):
                yield Samples(seed, epoch, *left[:, start : start + size])
            left = left[:, whole:]
        if left.size and not self.drop_last:
            yield Samples(seed, epoch, *left)

    def _start(self, filling: tuple[Any, list[Future[LoaderTimes]], int]) -> tuple[Any, int]:
        room, futures, num = filling
        began = perf_counter()
        for future in futures:
            self.times += future.result()
        filled = perf_counter()
        started = self.maker.start(room)
        self.times += LoaderTimes(waiting=filled - began, copying=perf_counter() - filled)
        return started, num

    # -- what it costs

    def cost(self) -> tuple[float, float, float]:
        """Seconds that a batch has cost so far: reading and decoding, one thread's worth, and
        handing over.

        Handing over is collating, copying, and waiting that the threads' work does not explain.
        `GapMeter` asks for it.
        """
        times, num = self.times, max(1, self.times.batches)
        explained = (times.reading + times.transforming + times.collating) / self.num_threads
        handing_over = times.collating + times.copying + max(0.0, times.waiting - explained)
        return times.reading / num, times.transforming / num, handing_over / num

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Where training stands if all batches that were handed over were trained on; the same
        on every rank.
        """
        return self.trained_state(0)

    def trained_state(self, not_trained: int) -> dict[str, Any]:
        """Where training stands if it has yet to be trained on the last ``not_trained`` batches
        handed over.
        """
        run, sampler = self._run, self.sampler
        if run is None or run.began["epoch"] != sampler.epoch:
            run = self._run_from_here()
        batches = max(0, run.batches - not_trained)
        num = batches * self.batch_size
        with sampler.placed(*run.place):
            position = sampler.advanced(run.began["position"], num)
        state = run.began | {"position": position, "taken": run.began["taken"] + num}
        images = {} if self.images is None else {"images": self.images}
        return {"sampler": state, "batches": run.batches_before + batches} | images

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the sample after the last one trained on, with this loader's batch size and
        number of ranks.

        Raises:
            ConfigurationError: The state is of another data set or another kind of sampler.
        """
        if (saved := state.get("images", self.images)) != self.images:
            raise ConfigurationError(
                f"the checkpoint was saved over the images {saved!r}, but this loader reads "
                f"{self.images!r}: its position means nothing here. Open the images as they were, "
                "such as ShardDataset(..., generation=N), or start a new training from the "
                "checkpoint's weights."
            )
        self.sampler.load_state_dict(state["sampler"])
        self._run = None
        self._resumed = {(self.sampler.epoch, self.sampler.position): state["batches"]}
        whole = self._num_batches(0)
        if len(self) != whole:
            log.warning(
                "lightning_ring: this epoch began with another number of ranks or batch size and "
                "has %d batches, the next ones have %d. Lightning notices with "
                "Trainer(reload_dataloaders_every_n_epochs=1) only.",
                len(self),
                whole,
            )


class ItemBatches:
    """Makes ``collate([dataset[i], ...])``, a whole batch in one thread, on the CPU (Lightning
    moves it).

    Random transforms inside the data set draw from generators that all threads share: they are not
    reproducible.

    Args:
        dataset: Map style, safe to read from several threads. ``__getitems__`` is used where there
            is one.
        collate: Makes a batch of a list of samples.
    """

    chunk: int | None = None
    ahead = False

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self.items = dataset
        self.collate = collate

    def open(self, samples: Samples) -> list[Any]:
        return []

    def fill(self, room: list[Any], offset: int, samples: Samples) -> LoaderTimes:
        began, wanted = perf_counter(), samples.indices.tolist()
        what, got = f"one of the samples {wanted}", []
        try:
            if hasattr(self.items, "__getitems__"):
                got = list(self.items.__getitems__(wanted))
            else:
                for index in wanted:
                    what = f"sample {index}"
                    got.append(self.items[index])
        except Exception as error:
            raise SampleError(
                f"{what} of {type(self.items).__name__} cannot be had: {error!r}"
            ) from error
        fetched = perf_counter()
        try:
            room.append(self.collate(got))
        except Exception as error:
            raise SampleError(f"samples {wanted} make no batch: {error!r}") from error
        return LoaderTimes(transforming=fetched - began, collating=perf_counter() - fetched)

    def start(self, room: list[Any]) -> Any:
        return room[0]

    def finish(self, started: Any) -> Any:
        return started


def item_loader(
    dataset: Any,
    sampler: OrderedSampler,
    batch_size: int | None = None,
    *,
    collate: Callable[[list[Any]], Any] = default_collate,
    **options: Unpack[LoaderOptions],
) -> Loader:
    """Batches of any map-style torch data set. ``options`` as for `Loader`; see also
    `ItemBatches`.
    """
    return Loader(ItemBatches(dataset, collate), sampler, batch_size, **options)
