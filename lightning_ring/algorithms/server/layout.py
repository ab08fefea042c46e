"""Parameters in messages of bytes: which message holds which part of them, and where. Gossip cuts
its messages this way too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes: a view of any dtype may begin there


@dataclass(frozen=True, slots=True)
class ServerPiece:
    """Elements ``start`` to ``stop`` of parameter number ``index``, flattened; at byte
    ``offset`` of a message.
    """

    index: int
    start: int
    stop: int
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """The piece of a tensor that has the parameter's shape; 1-D, a view if ``tensor`` is
        contiguous.
        """
        return tensor.detach().reshape(-1)[self.start : self.stop]


@dataclass(frozen=True, slots=True)
class ServerLayout:
    """The pieces of one server, and the length of a message with a value for each element."""

    pieces: tuple[ServerPiece, ...]
    nbytes: int

    def views(self, message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """The memory of each piece in the uint8 ``message``, 1-D; ``like`` are the parameters."""
        found = []
        for piece in self.pieces:
            dtype = like[piece.index].dtype
            end = piece.offset + (piece.stop - piece.start) * dtype.itemsize
            found.append(message[piece.offset : end].view(dtype))
        return found


def layouts(params: Sequence[Tensor], num_servers: int, *, cut: bool) -> list[ServerLayout]:
    """Each server's part of ``params``. With ``cut`` equally many bytes each, else whole
    parameters, balanced.
    """
    found: list[list[Range]] = [[] for _ in range(num_servers)]
    if cut:
        _cut(params, found)
    else:
        _spread(params, found)
    return [_layout(sorted(ranges), params) for ranges in found]


Range = tuple[int, int, int]  # of a parameter: index, start, stop


def _cut(params: Sequence[Tensor], found: list[list[Range]]) -> None:
    total = sum(param.nbytes for param in params)
    first = 0  # byte at which the parameter begins, in all of them
    for index, param in enumerate(params):
        bounds = [
            min(max(-(-(total * server // len(found) - first) // param.itemsize), 0), param.numel())
            for server in range(len(found) + 1)
        ]
        for server, ranges in enumerate(found):
            start, stop = bounds[server : server + 2]
            if start < stop or (server == 0 and not param.numel()):  # an empty one has state too
                ranges.append((index, start, stop))
        first += param.nbytes


def _spread(params: Sequence[Tensor], found: list[list[Range]]) -> None:
    """The largest first, to the server that has least."""
    loads = [0] * len(found)
    for index in sorted(range(len(params)), key=lambda index: -params[index].nbytes):
        server = loads.index(min(loads))
        loads[server] += params[index].nbytes
        found[server].append((index, 0, params[index].numel()))


def _layout(ranges: Iterable[Range], params: Sequence[Tensor]) -> ServerLayout:
    pieces, offset = [], 0
    for index, start, stop in ranges:
        pieces.append(ServerPiece(index, start, stop, offset))
        offset += -(-(stop - start) * params[index].itemsize // _ALIGNMENT) * _ALIGNMENT
    return ServerLayout(tuple(pieces), offset)


@torch.no_grad()
def write_(params: Sequence[Tensor], pieces: Iterable[tuple[ServerPiece, Tensor]]) -> None:
    """Copy values into ``params``, in place."""
    for piece, value in pieces:
        param = params[piece.index]
        flat = param.detach().reshape(-1)
        flat[piece.start : piece.stop].copy_(value)
        if not param.is_contiguous():  # channels_last: ``flat`` is a copy
            param.copy_(flat.view(param.shape))
