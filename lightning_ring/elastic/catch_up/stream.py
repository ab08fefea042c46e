"""A newcomer's side of a catch-up: takes the state of ranks that train, and their steps."""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from secrets import token_hex
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_ring.algorithms.sharded.inventory import Inventory, Span
from lightning_ring.comm.replicate import digest_of_model
from lightning_ring.elastic.catch_up.wire import receive, receive_bytes
from lightning_ring.job.watch.messages import watch_for_loss

ACCEPT_SECONDS = 15.0  # for a rank to connect
HELLO_SECONDS = 5.0
QUIET_SECONDS = 20.0  # in which nothing came, while all others wait for this process
_LOOK_SECONDS = 0.1

_log = logging.getLogger("lightning_ring")


class StateStream(threading.Thread):
    """Brings ``module`` and ``optimizers`` to the state of the ranks that connect to ``port`` and
    send ``token``.

    Both are changed in place. A piece that came after step n takes part in the steps from n + 1 on.
    One rank sends all, or each rank of a generation its own part. Any failure ends the stream:
    state that has not come is sent when this process joins.

    Attributes:
        complete: Set once every piece has come.
        over: Set at the end of the stream.
        refusal: Why the ranks send nothing; empty if they do.
        parts: The optimizers' state of parts of parameters, after `close`.
    """

    def __init__(self, address: str, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        super().__init__(name="ring-catch-up", daemon=True)
        self.complete = threading.Event()
        self.over = threading.Event()
        self.refusal = ""
        self.parts = Inventory()
        self.token = token_hex(16)
        self._module = module
        self._params = list(module.parameters())
        self._optimizers = list(optimizers)
        self._indices = [
            [
                {index for index, param in enumerate(self._params) if _is_in(param, group)}
                for group in one.param_groups
            ]
            for one in self._optimizers
        ]
        self._device = self._params[0].device if self._params else torch.device("cpu")
        self._listener = socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        )
        self._changing = threading.RLock()  # module and optimizers
        self._senders: list[_Sender] = []
        self._expected: tuple[int, int] | None = None  # number of senders, and their generation
        self._closed = False
        self._heard = time.monotonic()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def step(self) -> int:
        """The number of steps that all of the state has taken; -1 before any of a sender has
        come.
        """
        senders = self._senders
        return (
            min(sender.step for sender in senders) if 0 < len(senders) == self.num_senders else -1
        )

    @property
    def num_senders(self) -> int:
        """The number of ranks that send; 0 before that is known."""
        return self._expected[0] if self._expected is not None else 0

    def count_bytes(self, largest: int) -> tuple[int, int]:
        """Of parameters, and of the optimizers' state that has come: in tensors of ``largest``
        bytes at most.
        """
        with self._changing:
            states = tree_leaves([list(optimizer.state.values()) for optimizer in self._optimizers])
            sizes = [
                [value.nbytes for value in one if torch.is_tensor(value)]
                for one in (self._params, states)
            ]
        parameters, state = (sum(size for size in one if size <= largest) for one in sizes)
        return parameters, state

    def run(self) -> None:
        try:
            with self._listener:
                self._accept_all()
            for sender in self._senders:
                if self._closed:  # it may have come while the others were closed
                    sender.close()
                sender.join()
        except OSError as error:
            self.end(error)
        finally:
            for sender in self._senders:
                sender.close()
            self.over.set()

    def reach(self, step: int, check: Callable[[], None]) -> None:
        """Return when ``step`` steps are taken, or when the stream has ended or is silent for
        `QUIET_SECONDS`.

        ``check`` is called again and again meanwhile, and may raise.
        """
        self._heard = time.monotonic()
        while 0 <= self.step < step and not self.over.wait(0.001):
            check()
            if time.monotonic() - self._heard > QUIET_SECONDS:
                return

    def close(self) -> None:
        """End the stream. Afterwards it changes nothing any more, and the optimizers have state
        of parameters alone.
        """
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for sender in list(self._senders):
            sender.close()
        if self.is_alive():
            self.join()
        for sender in self._senders:
            for number, key in sender.keys.items():
                index, first, numel, _ = sender.pieces[number]
                if first is not None:
                    state = [
                        optimizer.state.pop(key, None) or None for optimizer in self._optimizers
                    ]
                    self.parts.add(Span(index, first, numel), state)
            sender.keys.clear()

    def end(self, error: Exception) -> None:
        """End all of it, because of ``error`` of a sender."""
        # such as an optimizer that cannot step a part of its parameters
        if not isinstance(error, OSError):
            _log.warning(
                "lightning_ring: this process gets its state while all others wait: %r", error
            )
            self.refusal = repr(error)
        elif not self._closed and not self.refusal and not self.complete.is_set():
            _log.info("lightning_ring: the state from another rank came to an end: %s", error)
        # else the others send their last steps
        if not self.complete.is_set() or not isinstance(error, OSError):
            self._closed = True
            for sender in list(self._senders):
                sender.close()

    def _accept_all(self) -> None:
        until = time.monotonic() + ACCEPT_SECONDS
        while not self._closed and (
            self._expected is None or len(self._senders) < self._expected[0]
        ):
            if (connection := self._accept()) is not None:
                self._senders.append(sender := _Sender(self, connection))
                sender.start()
                until = time.monotonic() + ACCEPT_SECONDS
            elif self._expected is None and self._senders:
                until = time.monotonic() + ACCEPT_SECONDS  # it begins with its next step
            elif time.monotonic() > until:
                raise TimeoutError(f"no further rank has connected within {ACCEPT_SECONDS:g} s")

    def _accept(self) -> socket.socket | None:
        self._listener.settimeout(_LOOK_SECONDS)
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            return None
        connection.settimeout(HELLO_SECONDS)
        with contextlib.suppress(OSError):
            if hmac.compare_digest(receive_bytes(connection, len(self.token)), self.token.encode()):
                connection.settimeout(None)
                watch_for_loss(connection)
                return connection
        connection.close()
        return None

    def take_next(self, sender: _Sender) -> None:
        """Receive the next message of ``sender``, and do what it says."""
        message = receive(sender.connection, self._device)
        with self._changing:
            if not self._closed:
                self._heard = time.monotonic()
                self._take(sender, message)

    def _take(self, sender: _Sender, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "refused":
            self.refusal = message["why"]
            self._closed = True
        elif kind == "model":
            self._take_description(sender, message)
        elif kind == "state":
            self._take_state(sender, message["piece"])
        elif kind == "step":
            self._take_step(sender, message["gradients"], message["groups"])
        else:
            sender.complete = True
        sender.step = message.get("step", sender.step)
        if self.step >= 0 and all(one.complete for one in self._senders):
            self.complete.set()

    def _take_description(self, sender: _Sender, message: dict[str, Any]) -> None:
        if message["digest"] != digest_of_model(self._module):
            raise ValueError("the ranks hold different models")  # named when it joins
        self._expected = self._expected or message["senders"]
        if self._expected != message["senders"]:
            raise ConnectionError("the ranks have changed")
        sender.pieces = message["pieces"]

    @torch.no_grad()
    def _take_state(self, sender: _Sender, piece: dict[int, tuple[Tensor, list[Any]]]) -> None:
        for number, (value, states) in piece.items():
            key = sender.keys[number] = self._key(*sender.pieces[number])
            key.copy_(value)
            for optimizer, state in zip(self._optimizers, states, strict=True):
                if state is not None:
                    optimizer.state[key] = state

    def _key(
        self, index: int, first: int | None, numel: int, strides: tuple[int, ...]
    ) -> Parameter:
        """What optimizers step: a parameter, or a part of its memory."""
        param = self._params[index]
        if first is None:
            return param
        if not param.stride() == strides == torch.empty_like(param, device="meta").stride():
            raise ValueError(
                f"parameter number {index} has another order of memory than on the ranks"
            )
        memory = param.detach().as_strided((numel,), (1,), int(param.storage_offset()) + first)
        return Parameter(memory, requires_grad=param.requires_grad)

    def _take_step(
        self, sender: _Sender, gradients: dict[int, Tensor], groups: list[list[dict[str, Any]]]
    ) -> None:
        for optimizer, values in zip(self._optimizers, groups, strict=True):
            for group, named in zip(optimizer.param_groups, values, strict=True):
                group.update(named)
        for param in self._params:
            param.grad = None
        for number, gradient in gradients.items():
            sender.keys[number].grad = gradient
        with self._stepping(sender):
            for optimizer in self._optimizers if gradients else ():
                optimizer.step()
        for key in (*self._params, *sender.keys.values()):
            key.grad = None

    @contextlib.contextmanager
    def _stepping(self, sender: _Sender) -> Iterator[None]:
        """The optimizers' groups contain the parts that came from ``sender``."""
        if all(first is None for _, first, *_ in sender.pieces):
            yield
            return
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        indices = [own for of_groups in self._indices for own in of_groups]
        whole = [group["params"] for group in groups]
        for group, own in zip(groups, indices, strict=True):
            group["params"] = [
                key for number, key in sender.keys.items() if sender.pieces[number][0] in own
            ]
        try:
            yield
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params


class _Sender(threading.Thread):
    """Takes what one rank sends.

    Attributes:
        pieces: Index of the parameter, begin, number of elements and strides of each; `None` for a
            whole parameter.
        keys: The pieces that have come, by their number, as keys of optimizer state.
        complete: Whether all of them have come.
        step: The number of steps that they have taken.
    """

    def __init__(self, stream: StateStream, connection: socket.socket) -> None:
        super().__init__(name="ring-catch-up-from", daemon=True)
        self.connection = connection
        self.pieces: list[tuple[int, int | None, int, tuple[int, ...]]] = []
        self.keys: dict[int, Parameter] = {}
        self.complete = False
        self.step = -1
        self._stream = stream

    def run(self) -> None:
        try:
            with self.connection:
                while True:
                    self._stream.take_next(self)
        except Exception as error:
            self._stream.end(error)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def _is_in(param: Parameter, group: dict[str, Any]) -> bool:
    return any(param is other for other in group["params"])
