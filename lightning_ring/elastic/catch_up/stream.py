"""A newcomer's side of a catch-up: takes the state of a rank that trains, and its steps."""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from secrets import token_hex
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ring.comm.replicate import digest_of_model
from lightning_ring.elastic.catch_up.wire import receive, receive_bytes
from lightning_ring.job.watch.messages import watch_for_loss

ACCEPT_SECONDS = 15.0  # for a rank to connect
HELLO_SECONDS = 5.0
QUIET_SECONDS = 20.0  # in which nothing came, while all others wait for this process

_log = logging.getLogger("lightning_ring")


class Stream(threading.Thread):
    """Brings ``module`` and ``optimizers`` to the state of the rank that connects to ``port`` and sends ``token``.

    Both are changed in place. A parameter that came after step n takes part in the steps from n + 1 on. Any failure
    ends the stream: state that has not come is sent when this process joins.

    Attributes:
        complete: Set once every parameter has come.
        over: Set at the end of the stream.
        refusal: Why the rank sends nothing; empty if it does.
        step: The number of steps that the state of this process has taken; -1 before any state has come.
    """

    def __init__(self, address: str, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        super().__init__(name="ring-catch-up", daemon=True)
        self.complete = threading.Event()
        self.over = threading.Event()
        self.refusal = ""
        self.step = -1
        self.token = token_hex(16)
        self._module = module
        self._params = list(module.parameters())
        self._optimizers = list(optimizers)
        self._device = self._params[0].device if self._params else torch.device("cpu")
        self._listener = socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        )
        self._connection: socket.socket | None = None
        self._closed = False
        self._heard = time.monotonic()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def run(self) -> None:
        try:
            with self._listener, self._accept() as connection:
                self._connection = connection
                connection.settimeout(None)
                watch_for_loss(connection)
                while not self._closed:
                    message = receive(connection, self._device)
                    self._heard = time.monotonic()
                    self._take(message)
        except OSError as error:
            if not self._closed and not self.refusal and not self.complete.is_set():
                _log.info("lightning_ring: the state from another rank came to an end: %s", error)
        except Exception as error:  # such as an optimizer that cannot step a part of its parameters
            _log.warning("lightning_ring: this process gets its state while all others wait: %r", error)
            self.refusal = repr(error)
        finally:
            self.over.set()

    def reach(self, step: int, check: Callable[[], None]) -> None:
        """Return when ``step`` steps are taken, or when the stream has ended or is silent for `QUIET_SECONDS`.

        ``check`` is called again and again meanwhile, and may raise.
        """
        self._heard = time.monotonic()
        while 0 <= self.step < step and not self.over.wait(0.001):
            check()
            if time.monotonic() - self._heard > QUIET_SECONDS:
                return

    def close(self) -> None:
        """End the stream. Afterwards it changes nothing any more."""
        self._closed = True
        for end in (self._connection, self._listener):
            with contextlib.suppress(OSError):
                if end is not None:
                    end.shutdown(socket.SHUT_RDWR)
        if self.is_alive():
            self.join()

    def _accept(self) -> socket.socket:
        until = time.monotonic() + ACCEPT_SECONDS
        while True:
            self._listener.settimeout(max(0.01, until - time.monotonic()))
            connection, _ = self._listener.accept()
            connection.settimeout(HELLO_SECONDS)
            with contextlib.suppress(OSError):
                if hmac.compare_digest(receive_bytes(connection, len(self.token)), self.token.encode()):
                    return connection
            connection.close()

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "refused":
            self.refusal = message["why"]
            self._closed = True
        elif kind == "model":
            if message["digest"] != digest_of_model(self._module):
                raise ValueError("the ranks hold different models")  # named when it joins
        elif kind == "state":
            self._take_state(message["piece"])
        elif kind == "step":
            self._take_step(message["gradients"], message["groups"])
        else:
            self.complete.set()
        self.step = message.get("step", self.step)

    @torch.no_grad()
    def _take_state(self, piece: dict[int, tuple[Tensor, list[Any]]]) -> None:
        for index, (value, states) in piece.items():
            param = self._params[index]
            param.copy_(value)
            for optimizer, state in zip(self._optimizers, states, strict=True):
                if state is not None:
                    optimizer.state[param] = state

    def _take_step(self, gradients: dict[int, Tensor], groups: list[list[dict[str, Any]]]) -> None:
        for optimizer, values in zip(self._optimizers, groups, strict=True):
            for group, named in zip(optimizer.param_groups, values, strict=True):
                group.update(named)
        for param in self._params:
            param.grad = None
        for index, gradient in gradients.items():
            self._params[index].grad = gradient
        for optimizer in self._optimizers if gradients else ():
            optimizer.step()
        for param in self._params:
            param.grad = None
