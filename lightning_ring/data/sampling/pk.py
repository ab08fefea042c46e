"""P x K sampling for metric learning: P classes with K samples each on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from typing_extensions import Unpack

from lightning_ring.data.sampling.counters import Stream, permute, subkey
from lightning_ring.data.sampling.sampler import Ints, OrderedSampler, SamplerOptions
from lightning_ring.data.sampling.weighted import classes_of
from lightning_ring.errors import ConfigurationError

_STEPS = 64  # computed at a time


class PKSampler(OrderedSampler):
    """Each step every rank gets ``p`` classes, ``k`` samples each, and no class comes to two ranks.

    The global order is a sequence of passes over all classes, ``k`` samples a class. A step takes
    the next ``p`` x world size classes; one that would reach over the end of a pass starts with the
    next pass instead, so that its classes are distinct whatever the number of ranks. Passes come in
    pairs: the second takes the second half of the first one's classes before the first half, in
    another order each. So a class that the end of a pass leaves out comes at the beginning of the
    next, and no class is left out of both.

    Groups of ``k`` go through a class without repeating a sample until fewer than ``k`` are left,
    and then through it in another order. A class with fewer than ``k`` samples repeats some: a crop
    or a colour change differs each time.

    For a DataLoader: ``batch_size=sampler.batch_size``.

    Args:
        labels: Class number of every sample, integers ≥ 0.
        p, k: Classes a rank and step, samples a class.
        options: ``seed``, ``rank``, ``world_size``: see `OrderedSampler`. ``fingerprint``: a hash
            of ``labels`` if left out.

    Raises:
        ConfigurationError: There are fewer than ``p`` x world size classes; when ranks are known.
    """

    def __init__(
        self,
        labels: npt.ArrayLike,
        p: int,
        k: int,
        **options: Unpack[SamplerOptions],
    ) -> None:
        if p < 1 or k < 2:
            raise ConfigurationError(
                f"p={p} and k={k} were given, expected p ≥ 1 classes and k ≥ 2 samples of each."
            )
        self.members, fingerprint = classes_of(labels)
        super().__init__(fingerprint, **options)
        self.p, self.k = p, k
        self.batch_size = p * k
        self.kind = f"p x k in pairs of passes, k={k}"
        self.drop_last = True
        counts = self.members.counts
        self._groups = np.maximum(counts // k, 1)
        self.num_classes = len(counts)
        self.num_passes = max(1, round(int(counts.sum()) / (k * self.num_classes)))
        if self._given:
            self._check_classes()

    @property
    def dataset(self) -> range:  # type: ignore[override]
        return range(self.total_size)  # nothing is repeated or dropped to make ranks even

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """Samples of all ranks in an epoch."""
        return self.num_left(0) * self.num_replicas

    def blocks(self) -> Iterator[tuple[Ints, Ints]]:
        self._check_classes()
        classes, width = self.num_classes, self.p * self.num_replicas
        number, offset = divmod(self.position // self.k, classes)
        for turn in range(number, self.num_passes):
            steps = (classes - offset) // width
            order = self._order(self.epoch * self.num_passes + turn)
            for first in range(0, steps, _STEPS):
                step = np.arange(first, min(first + _STEPS, steps))[:, None]
                places = (
                    offset + step * width + np.arange(self.p) * self.num_replicas + self.rank
                ).reshape(-1)
                positions = (turn * classes + places)[:, None] * self.k + np.arange(self.k)
                yield positions.reshape(-1), self._draw(order[places], turn)
            offset = 0

    def _order(self, visit: int) -> Ints:
        """The classes in pass ``visit`` of the training, as places in `members`."""
        classes = self.num_classes
        pair, second = divmod(visit, 2)
        order = permute(np.arange(classes), classes, subkey(self.seed, Stream.ORDER, pair))
        if not second:
            return order
        halves = order[classes // 2 :], order[: classes // 2]
        for number, half in enumerate(halves):
            key = subkey(self.seed, Stream.ORDER, pair, 1 + number)
            half[:] = half[permute(np.arange(len(half)), len(half), key)]
        return np.concatenate(halves)

    def _draw(self, classes: Ints, turn: int) -> Ints:
        """The ``k`` samples that each of ``classes`` gives in pass ``turn`` of this epoch."""
        visit = self.epoch * self.num_passes + turn
        cycle, group = np.divmod(visit, self._groups[classes])
        ordinal = group[:, None] * self.k + np.arange(self.k)
        repeated, cycle = np.repeat(classes, self.k), np.repeat(cycle, self.k)
        # wraps in classes of fewer than k samples only
        ordinal = ordinal.reshape(-1) % self.members.counts[repeated]
        return self.members.draw(self.seed, repeated, cycle, ordinal)

    def num_left(self, position: int) -> int:
        self._check_classes()
        number, offset = divmod(position // self.k, self.num_classes)
        if number >= self.num_passes:
            return 0
        width = self.p * self.num_replicas
        rest = (self.num_passes - number - 1) * (self.num_classes // width)
        return ((self.num_classes - offset) // width + rest) * self.batch_size

    def advanced(self, position: int, num: int) -> int:
        classes, width, steps = self.num_classes, self.p * self.num_replicas, num // self.batch_size
        number, offset = divmod(position // self.k, classes)
        here = (classes - offset) // width
        if steps > here:
            passes, steps = divmod(steps - here - 1, classes // width)
            number, offset, steps = number + 1 + passes, 0, steps + 1
        return (number * classes + offset + steps * width) * self.k

    def _check_classes(self) -> None:
        if self.num_classes < self.p * self.num_replicas:
            raise ConfigurationError(
                f"{self.num_classes} classes can be drawn from, but p={self.p} distinct ones on "
                f"each of {self.num_replicas} ranks need {self.p * self.num_replicas}. Lower p to "
                f"{self.num_classes // self.num_replicas} at most, or use fewer ranks."
            )
