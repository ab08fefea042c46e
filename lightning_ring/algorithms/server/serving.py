"""The exchange between workers and servers: gradients there, weights back."""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_ring.algorithms.server.layout import ServerLayout, layouts, write_
from lightning_ring.algorithms.server.shard import Push, ServerShard
from lightning_ring.algorithms.server.twin import (
    Settings,
    Twin,
    can_be_cut,
    settings_of,
    whole_state,
)
from lightning_ring.comm.calls import by_rank
from lightning_ring.comm.communicator import Communicator
from lightning_ring.errors import ModelMismatchError

_TOLD = 16  # bytes behind the weights: whether to stop, and the delay


class Pulled(NamedTuple):
    """What a worker learns with the weights, which it has in its parameters."""

    told_to_stop: bool
    delay: int


class Serving:
    """The worker of this rank, and its server, if it is one of the ranks ``servers``. Building one
    is collective.

    The first ``num_workers`` ranks are workers: all, or those before the servers. ``how`` are
    arguments of `ServerShard`. The servers begin with the parameters and the optimizer's state of
    their ranks, which are the same on all.

    Raises:
        ModelMismatchError: Ranks train different parameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params: Sequence[Parameter],
        servers: Sequence[int],
        num_workers: int,
        comm: Communicator,
        **how: Any,
    ) -> None:
        _check_equal(params, comm)
        self.params = list(params)
        self._optimizer = optimizer
        self._comm = comm
        parts = layouts(params, len(servers), cut=can_be_cut(optimizer))
        self._layouts = dict(zip(servers, parts, strict=True))
        self._shard: ServerShard | None = None
        if comm.rank in self._layouts:
            twin = Twin(optimizer, params, self._layouts[comm.rank])
            self._shard = ServerShard(twin, num_workers, check=self._check, **how)
        self._questions = {server: torch.empty(0, dtype=torch.uint8) for server in servers}
        self._answers = {worker: torch.empty(0, dtype=torch.uint8) for worker in range(num_workers)}
        self._requests = comm.open_requests(self._answer)
        self._requests.start()

    def exchange(self, asks_to_stop: bool, step: int) -> Pulled:
        """Push this rank's gradients, and replace its parameters by the servers' weights."""
        settings = settings_of(self._optimizer)
        for server, layout in self._layouts.items():
            self._questions[server] = _encode(
                self._questions[server], layout, self.params, settings, asks_to_stop
            )
        questions = {server: [question] for server, question in self._questions.items()}
        lengths = {server: [layout.nbytes + _TOLD] for server, layout in self._layouts.items()}
        answers = self._requests.ask(
            questions, f"push and pull of step {step}", lengths=lengths
        ).wait()
        self._use({server: answer[:-_TOLD] for server, answer in answers.items()})
        first = answers[next(iter(self._layouts))]
        told, delay = first[-_TOLD:].view(torch.int64).tolist()
        return Pulled(bool(told), delay)

    def rest(self) -> None:
        """Tell the servers that this worker pushes nothing for a while."""
        self._requests.ask(
            dict.fromkeys(self._layouts, (torch.empty(0, dtype=torch.uint8),)), "pause"
        ).wait()

    def wait_for_workers(self) -> None:
        """On a server that does not train: return when all workers rest. However long their
        epoch lasts.
        """
        assert self._shard is not None
        self._shard.wait_for_workers()

    def end_rest(self, *, with_weights: bool) -> None:
        """Go on, from the servers' weights, which replace every rank's parameters. Collective,
        while all workers rest.

        ``with_weights=False``: the parameters are those weights already.
        """
        weights: dict[int, Tensor] = {}
        if self._shard is not None:
            self._shard.meet()
        if not with_weights or not all(layout.nbytes for layout in self._layouts.values()):
            self._comm.barrier(name="servers")  # no worker goes on before all servers know of it
        if not with_weights:
            return
        for server, layout in self._layouts.items():
            weights[server] = torch.empty(layout.nbytes, dtype=torch.uint8)
            if not layout.nbytes:  # fewer parameters than servers
                continue
            if self._shard is not None and server == self._comm.rank:
                torch._foreach_copy_(
                    layout.views(weights[server], self.params), self._shard.weights()
                )
            self._comm.broadcast_(
                weights[server], src=server, name=f"weights of server {server}"
            ).wait()
        self._use(weights)

    def allow_to_go_on(self) -> None:
        """Forget a request to stop, which all ranks have met."""
        if self._shard is not None:
            self._shard.told_to_stop = False

    def state(self, *, keep: bool) -> dict[Parameter, dict[str, Any]]:
        """The whole state of the optimizer, by parameter and on the CPU; empty without ``keep``.
        Collective.
        """
        found = []
        for server, layout in self._layouts.items():
            mine = (
                self._shard.twin.state()
                if self._shard is not None and server == self._comm.rank
                else None
            )
            states = self._comm.broadcast_object(mine, src=server, name="state of a server")
            assert states is not None
            if keep:
                found.append((layout, states))
        return whole_state(self.params, found)

    def close(self, *, wait: bool = True) -> None:
        self._requests.close(wait=wait)

    def _use(self, weights: dict[int, Tensor]) -> None:
        pairs = [
            pair
            for server, layout in self._layouts.items()
            for pair in zip(layout.pieces, layout.views(weights[server], self.params), strict=True)
        ]
        write_(self.params, pairs)

    # -- in the threads of the server

    def _answer(self, worker: int, question: Tensor) -> Tensor:
        assert self._shard is not None, "workers ask servers alone"
        if not question.numel():
            self._shard.rest(worker)
            return question
        layout = self._shard.twin.layout
        answer = self._answers[worker]
        if not answer.numel():
            answer = self._answers[worker] = torch.zeros(layout.nbytes + _TOLD, dtype=torch.uint8)
        push = _decode(question, layout, self.params)
        delay = self._shard.push(worker, push, layout.views(answer, self.params))
        answer[-_TOLD:].view(torch.int64).copy_(
            torch.tensor([int(self._shard.told_to_stop), delay])
        )
        return answer

    def _check(self) -> None:
        self._requests.check()


@torch.no_grad()
def _encode(
    memory: Tensor,
    layout: ServerLayout,
    params: Sequence[Parameter],
    settings: Settings,
    asks_to_stop: bool,
) -> Tensor:
    """Gradients, a byte for each piece that has one, a byte for the request, and the settings. In
    ``memory``, if it is long enough."""
    text = torch.frombuffer(bytearray(pickle.dumps(settings)), dtype=torch.uint8)
    start = layout.nbytes + len(layout.pieces) + 1
    if memory.numel() != start + text.numel():
        memory = torch.zeros(start + text.numel(), dtype=torch.uint8)
    flags = []
    for piece, view in zip(layout.pieces, layout.views(memory, params), strict=True):
        gradient = params[piece.index].grad
        flags.append(gradient is not None)
        if gradient is not None:
            view.copy_(
                piece.of(gradient.to_dense() if gradient.layout != torch.strided else gradient)
            )
    memory[layout.nbytes : start] = torch.tensor([*flags, asks_to_stop], dtype=torch.uint8)
    memory[start:] = text
    return memory


def _decode(question: Tensor, layout: ServerLayout, params: Sequence[Parameter]) -> Push:
    """Gradients in the memory of ``question``."""
    start = layout.nbytes + len(layout.pieces) + 1
    *flags, asks_to_stop = question[layout.nbytes : start].tolist()
    text = question[start:]
    settings = pickle.loads(ctypes.string_at(text.data_ptr(), text.numel()))
    views = layout.views(question, params)
    return Push(
        [view if has else None for view, has in zip(views, flags, strict=True)],
        settings,
        bool(asks_to_stop),
    )


def _check_equal(params: Sequence[Parameter], comm: Communicator) -> None:
    shapes = [f"{len(params)} parameters, {[(tuple(p.shape), str(p.dtype)) for p in params]}"]
    texts = [text for (text,) in comm.all_gather_object(shapes, name="shapes of a server")]
    if len(set(texts)) > 1:
        shown = by_rank([text[:200] for text in texts])
        raise ModelMismatchError(
            f"the ranks' optimizers train different parameters: {shown}. Freeze and add the same "
            "on every rank."
        )
