"""Parts of the parameters as messages of bytes, to servers and between ranks that gossip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

_ALIGNMENT = 16  # bytes: a view of any dtype may begin there


class ParameterPart(NamedTuple):
    """Some of the parameters by number, and where each begins in a message of bytes."""

    indices: Sequence[int] = ()
    offsets: Sequence[int] = ()
    nbytes: int = 0

    def views(self, message: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
        """The memory of each parameter in the uint8 ``message``, with its shape; ``params`` are
        all of them.
        """
        views = []
        for index, offset in zip(self.indices, self.offsets, strict=True):
            param = params[index]
            memory = message[offset : offset + param.nbytes]
            views.append(memory.view(param.dtype).view(param.shape))
        return views


def parts_of(params: Sequence[Tensor], num_parts: int) -> list[ParameterPart]:
    """``params`` in parts of about equally many bytes: the largest first, to the part that has
    least. There are no more parts than parameters.
    """
    count = min(num_parts, len(params))
    indices: list[list[int]] = [[] for _ in range(count)]
    offsets: list[list[int]] = [[] for _ in range(count)]
    ends = [0] * count
    for index in sorted(range(len(params)), key=lambda index: -params[index].nbytes):
        part = ends.index(min(ends))
        indices[part].append(index)
        offsets[part].append(ends[part])
        ends[part] += -(-params[index].nbytes // _ALIGNMENT) * _ALIGNMENT
    return [ParameterPart(*part) for part in zip(indices, offsets, ends, strict=True)]
