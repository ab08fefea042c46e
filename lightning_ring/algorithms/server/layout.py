"""Which server holds which part of the parameters, and where each part lies in a message."""

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
        """The piece of a tensor that has the parameter's shape; 1-D, a view where ``tensor`` is
        contiguous.
        """
        return tensor.detach().reshape(-1)[self.start : self.stop]


@dataclass(frozen=True, slots=True)
class ServerLayout:
    """The pieces of one server, and the length of a message with a value for each of their
    elements.
    """

    pieces: tuple[ServerPiece, ...]
    nbytes: int

    def views(self, message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """The memory of each piece in the uint8 ``message``, 1-D; ``like`` are the parameters."""
        found = []
        for piece in self.pieces:
            dtype = like[piece.index].dtype
            memory = message[
                piece.offset : piece.offset + (piece.stop - piece.start) * dtype.itemsize
            ]
            found.append(memory.view(dtype))
        return found


def layouts(params: Sequence[Tensor], num_servers: int, *, cut: bool) -> list[ServerLayout]:
    """Each server's part of ``params``. With ``cut`` equally many bytes each, else whole
    parameters, balanced.
    """
    ranges = _cut(params, num_servers) if cut else _whole(params, num_servers)
    return [_layout(each, params) for each in ranges]


Range = tuple[int, int, int]  # of a parameter: index, start, stop


def _cut(params: Sequence[Tensor], num_servers: int) -> list[list[Range]]:
    total = sum(param.nbytes for param in params)
    found: list[list[Range]] = [[] for _ in range(num_servers)]
    first = 0  # byte at which the parameter begins, in all of them
    for index, param in enumerate(params):
        size = param.element_size()
        for server in range(num_servers):
            start, stop = (
                min(max(-(-(total * bound // num_servers - first) // size), 0), param.numel())
                for bound in (server, server + 1)
            )
            if start < stop or (server == 0 and not param.numel()):  # an empty one has state too
                found[server].append((index, start, stop))
        first += param.nbytes
    return found


def _whole(params: Sequence[Tensor], num_servers: int) -> list[list[Range]]:
    """The largest first, to the server that has least."""
    loads = [0] * num_servers
    found: list[list[Range]] = [[] for _ in range(num_servers)]
    for index in sorted(range(len(params)), key=lambda index: (-params[index].nbytes, index)):
        server = loads.index(min(loads))
        loads[server] += params[index].nbytes
        found[server].append((index, 0, params[index].numel()))
    return [sorted(each) for each in found]


def _layout(ranges: Iterable[Range], params: Sequence[Tensor]) -> ServerLayout:
    pieces, offset = [], 0
    for index, start, stop in ranges:
        pieces.append(ServerPiece(index, start, stop, offset))
        offset += -(-(stop - start) * params[index].element_size() // _ALIGNMENT) * _ALIGNMENT
    return ServerLayout(tuple(pieces), offset)


@torch.no_grad()
def write_(params: Sequence[Tensor], pieces: Iterable[tuple[ServerPiece, Tensor]]) -> None:
    """Copy values into ``params``, which together get a value for each of their elements."""
    scattered: dict[int, Tensor] = {}
    targets, values = [], []
    for piece, value in pieces:
        param = params[piece.index]
        if param.is_contiguous():
            flat = param.detach().view(-1)
        else:  # channels_last: a view of some elements in a row is none of the parameter's memory
            flat = scattered.setdefault(piece.index, param.new_empty(param.numel()))
        targets.append(flat[piece.start : piece.stop])
        values.append(value)
    if targets:
        torch._foreach_copy_(targets, values)
    for index, flat in scattered.items():
        params[index].copy_(flat.view(params[index].shape))
