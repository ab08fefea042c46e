"""A flat tensor as rows of equal length, one a shard, for collectives that need them equal."""

from __future__ import annotations

from torch import Tensor

from lightning_ring.comm.communicator import shard


class PaddedRows:
    """1-D ``flat`` as equal rows, one a shard: its own memory or, where shards differ in length,
    a padded copy.
    """

    def __init__(self, flat: Tensor, num_rows: int) -> None:
        self._source = flat
        self._length, self._num_longer = divmod(flat.numel(), num_rows)
        self._num_rows = num_rows
        self.flat = flat if not self._num_longer else flat.new_zeros(num_rows * (self._length + 1))

    def __getitem__(self, index: int) -> Tensor:
        return shard(self.flat, self._num_rows, index)

    def load(self, index: int | None = None) -> None:
        """Copy into row ``index``, or all rows, from the tensor."""
        for row, source in self._pairs(index):
            row.copy_(source)

    def store(self, index: int | None = None) -> None:
        for row, source in self._pairs(index):
            source.copy_(row)

    def _pairs(self, index: int | None) -> list[tuple[Tensor, Tensor]]:
        """Rows beside the parts of the tensor that they stand for; none if they are the same
        memory.
        """
        if not self._num_longer:
            return []
        if index is not None:
            part = shard(self._source, self._num_rows, index)
            return [(self[index][: part.numel()], part)]
        rows = self.flat.view(self._num_rows, self._length + 1)
        boundary = self._num_longer * (self._length + 1)
        return [
            (
                rows[: self._num_longer],
                self._source[:boundary].view(self._num_longer, self._length + 1),
            ),
            (
                rows[self._num_longer :, : self._length],
                self._source[boundary:].view(self._num_rows - self._num_longer, self._length),
            ),
        ]
