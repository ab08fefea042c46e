"""Messages of a catch-up: a pickled header, in which tensors are outlined, and behind it their
memory.
"""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

import torch
from torch import Tensor

from lightning_ring.comm.outline import filled, outline, specs_in

_LENGTH = struct.Struct("!Q")


class Message:
    """A value with tensors, copied to the host, as it is at the time of the call."""

    def __init__(self, value: Any) -> None:
        """Raises what pickle raises for values that cannot be sent."""
        tensors: list[Tensor] = []
        outlined = outline(value, tensors)
        self._head = pickle.dumps(outlined)
        specs = specs_in(outlined)
        self._tensors = [
            _copied(tensor, spec.strides) for tensor, spec in zip(tensors, specs, strict=True)
        ]
        self.nbytes = len(self._head) + sum(tensor.nbytes for tensor in tensors)

    def send(self, connection: socket.socket) -> None:
        connection.sendall(_LENGTH.pack(len(self._head)) + self._head)
        for tensor in self._tensors:
            if tensor.numel():
                connection.sendall(memory_of(tensor))


def receive(connection: socket.socket, device: torch.device) -> Any:
    """The next value. Tensors that were on an accelerator come to ``device``.

    Raises:
        OSError: The connection has ended.
    """
    (length,) = _LENGTH.unpack(receive_bytes(connection, _LENGTH.size))
    outlined = pickle.loads(receive_bytes(connection, length))
    tensors = []
    for spec in specs_in(outlined):
        tensors.append(tensor := torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype))
        if tensor.numel():
            _receive_into(connection, memory_of(tensor))
        if spec.on_accelerator:
            tensors[-1] = tensor.to(device)
    return filled(outlined, tensors)


def receive_bytes(connection: socket.socket, count: int) -> bytearray:
    """Raises `OSError` where the connection ends before."""
    data = bytearray(count)
    _receive_into(connection, memoryview(data))
    return data


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a dense tensor on the host that is not empty."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def _copied(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor.detach())


def _receive_into(connection: socket.socket, memory: memoryview) -> None:
    while memory:
        count = connection.recv_into(memory)
        if not count:
            raise ConnectionResetError("the other side has closed the connection")
        memory = memory[count:]
