"""The server side of `ParameterServer`: a part of the parameters, and how it is stepped.

Sources: Li et al., "Scaling distributed machine learning with the parameter server" (OSDI 2014);
Zheng et al., "Asynchronous stochastic gradient descent with delay compensation" (2017),
arXiv:1609.08326, equation 10.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_ring.algorithms.server.layout import ServerLayout, ServerPiece
from lightning_ring.comm.waiting import CHECK_SECONDS, ranks_text
from lightning_ring.errors import CollectiveError

TOLD_BYTES = 16  # after the weights of an answer: whether to stop, and the delay

Settings = dict[tuple[int, str], Any]  # by group and key: learning rates and the like


class Push(NamedTuple):
    """What a worker sends: a gradient for each piece (1-D; `None` for none), and how its optimizer
    is set.
    """

    gradients: Sequence[Tensor | None]
    settings: Settings
    asks_to_stop: bool = False


def settings_of(optimizer: Optimizer) -> Settings:
    """All but the parameters of each group, as plain numbers."""
    return {
        (number, key): value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


@torch.no_grad()
def encode(memory: Tensor, layout: ServerLayout, params: Sequence[Parameter], *told: Any) -> Tensor:
    """A `Push` of the gradients of ``params``, in ``memory`` if that is as long; ``told`` are its
    other fields.
    """
    gradients = [params[piece.index].grad for piece in layout.pieces]
    text = pickle.dumps(([gradient is not None for gradient in gradients], *told))
    if memory.numel() != layout.nbytes + len(text):
        memory = torch.zeros(layout.nbytes + len(text), dtype=torch.uint8)
    views = layout.views(memory, params)
    for piece, view, gradient in zip(layout.pieces, views, gradients, strict=True):
        if gradient is not None:
            view.copy_(piece.of(gradient.to_dense()))
    memory[layout.nbytes :] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return memory


class WeightServer:
    """The pieces of one server, and a twin of the user's ``optimizer`` that steps them on the CPU.

    Args:
        params: All parameters, of which ``layout`` has this server's pieces.
        num_workers: Each has a number from 0.
        bulk: Step with the average when all workers have pushed, else with each push at once.
        compensation: λ of `ParameterServer`.

    Attributes:
        check: Called while a push waits; what it raises ends the wait.
    """

    check: Callable[[], object] = staticmethod(lambda: None)

    def __init__(
        self,
        optimizer: Optimizer,
        params: Sequence[Parameter],
        layout: ServerLayout,
        num_workers: int,
        *,
        bulk: bool = False,
        compensation: float | None = None,
    ) -> None:
        self.num_updates = 0
        self.told_to_stop = False  # some worker has asked for it
        self._params, self._layout, self._num_workers = params, layout, num_workers
        self._bulk, self._compensation = bulk, compensation
        self._given = settings_of(optimizer)
        self._managed: set[tuple[int, str]] = set()  # what the user has changed since
        self._optimizer, weights = _twin(optimizer, params, layout)
        self._weights = [weights[params[piece.index]] for piece in layout.pieces]
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._round: dict[int, Push] = {}
        self._resting: set[int] = set()
        self._pulled = [0] * num_workers  # `num_updates` when each last saw the weights
        # by worker, the weights that it saw then
        self._seen: list[list[Tensor]] = []
        if compensation is not None:
            self._seen = [[each.clone() for each in self._flat()] for _ in range(num_workers)]
        length = layout.nbytes + TOLD_BYTES
        self._answers = [torch.zeros(length, dtype=torch.uint8) for _ in range(num_workers)]

    def state(self) -> list[dict[str, Any]]:
        """The optimizer's state of each piece."""
        return [self._optimizer.state.get(weight, {}) for weight in self._weights]

    def answer(self, worker: int, question: Tensor) -> Tensor:
        """The weights, after the step of a `Push` if ``question`` is longer than a byte. An empty
        one says that ``worker`` has ended its epoch, and has an empty answer.
        """
        if not question.numel():
            with self._changed:
                self._resting.add(worker)
                if len(self._resting) == self._num_workers:
                    self._resting.clear()
            return question
        answer, layout = self._answers[worker], self._layout
        push = None
        if question.numel() > 1:
            given, *told = pickle.loads(bytes(question[layout.nbytes :].tolist()))
            views = zip(layout.views(question, self._params), given, strict=True)
            push = Push([view if has else None for view, has in views], *told)
        delay = self.push(worker, push, layout.views(answer, self._params))
        numbers = torch.tensor([int(self.told_to_stop), delay])
        answer[-TOLD_BYTES:].view(torch.int64).copy_(numbers)
        return answer

    def push(self, worker: int, push: Push | None, pulled: Sequence[Tensor]) -> int:
        """Step, and copy the weights from which ``worker`` goes on into ``pulled``.

        Returns how many updates by others came between the weights that the worker has seen and its
        own.
        """
        with self._changed:
            delay = self.num_updates - self._pulled[worker]
            try:
                self._raise_failure()
                if push is not None and self._bulk:
                    self._finish_round_or_wait(worker, push)
                elif push is not None:
                    self.told_to_stop |= push.asks_to_stop
                    self._step(self._compensated(worker, push.gradients), push.settings)
            except Exception as error:
                self._failure = self._failure or error
                self._changed.notify_all()
                raise
            self._pulled[worker] = self.num_updates
            for targets in (pulled, *self._seen[worker : worker + 1]):
                torch._foreach_copy_([*targets], self._flat())
            return delay

    # -- holding the lock

    def _flat(self) -> list[Tensor]:
        return [weight.detach().view(-1) for weight in self._weights]

    def _finish_round_or_wait(self, worker: int, push: Push) -> None:
        self._round[worker], number = push, self.num_updates
        if len(self._round) == self._num_workers:
            pushes = [self._round[worker] for worker in range(self._num_workers)]
            self._round = {}
            self.told_to_stop = any(push.asks_to_stop for push in pushes)
            by_piece = zip(*(push.gradients for push in pushes), strict=True)
            self._step([average(gradients) for gradients in by_piece], pushes[0].settings)
            self._changed.notify_all()
        while self.num_updates == number:
            if self._resting:
                raise CollectiveError(
                    f"{ranks_text([*self._round])} took a step, while "
                    f"{ranks_text([*self._resting])} had ended its epoch, or evaluates. With "
                    "mode='bulk' all ranks take the same steps: give every rank the same number "
                    "of batches, or use mode='async'."
                )
            self._changed.wait(CHECK_SECONDS)
            self._raise_failure()
            self.check()

    def _step(self, gradients: Sequence[Tensor | None], settings: Settings) -> None:
        # what an optimizer changes in its groups itself stays
        changed = (place for place, value in settings.items() if value != self._given.get(place))
        self._managed.update(changed)
        for number, key in self._managed:
            self._optimizer.param_groups[number][key] = settings[number, key]
        for weight, gradient in zip(self._weights, gradients, strict=True):
            weight.grad = None if gradient is None else gradient.view(weight.shape)
        self._optimizer.step()
        self.num_updates += 1

    @torch.no_grad()
    def _compensated(
        self, worker: int, gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """g + λ g ⊙ g ⊙ (w - the weights for which g was computed)."""
        if self._compensation is None:
            return gradients
        return [
            None if g is None else g.addcmul(g * g, weight - seen, value=self._compensation)
            for g, weight, seen in zip(gradients, self._flat(), self._seen[worker], strict=True)
        ]

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def average(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Summed in the order of the workers, 16 bits as float32; `None` if no worker has one."""
    given = [gradient for gradient in gradients if gradient is not None]
    if not given:
        return None
    dtype = given[0].dtype
    total = given[0].to(torch.promote_types(dtype, torch.float32), copy=True)
    for gradient in given[1:]:
        total += gradient
    return (total / len(gradients)).to(dtype)


def _twin(
    optimizer: Optimizer, params: Sequence[Parameter], layout: ServerLayout
) -> tuple[Optimizer, dict[Parameter, Parameter]]:
    """An optimizer of the same class, settings and state over the pieces of ``layout``, and these
    by parameter.
    """
    weights: dict[Parameter, Parameter] = {}
    state: dict[Any, dict[str, Any]] = defaultdict(dict)
    for piece in layout.pieces:
        param = params[piece.index]
        weight = weights[param] = Parameter(_part(piece, param, param))
        for key, value in optimizer.state.get(param, {}).items():
            state[weight][key] = _part(piece, value, param)
    groups = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        held = [weights[param] for param in group["params"] if param in weights]
        groups.append(copy.deepcopy(settings) | {"params": held})
    # no hooks, and no `step` that a scheduler has patched
    kept = {
        k: v for k, v in vars(optimizer).items() if k != "step" and not k.startswith("_optimizer_")
    }
    made: Optimizer = object.__new__(type(optimizer))
    made.__setstate__(kept | {"state": state, "param_groups": groups})
    return made, weights


def _part(piece: ServerPiece, value: Any, param: Tensor) -> Any:
    """A copy of the part of ``value`` on the CPU; of all of it, if it has not one number for each
    element.
    """
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if value.shape == param.shape and piece.stop - piece.start < param.numel():
        value = piece.of(value)
    return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def whole_state(
    params: Sequence[Parameter], servers: Iterable[tuple[ServerLayout, Sequence[dict[str, Any]]]]
) -> dict[Any, dict[str, Any]]:
    """The optimizer's state by parameter, from the states of all servers' pieces."""
    whole: dict[Any, dict[str, Any]] = {}
    for layout, states in servers:
        for piece, state in zip(layout.pieces, states, strict=True):
            param, length = params[piece.index], piece.stop - piece.start
            for key, value in state.items():
                mine = whole.setdefault(param, {})
                if length == param.numel() or getattr(value, "shape", None) != (length,):
                    mine[key] = value
                    continue
                if key not in mine:
                    mine[key] = torch.empty(param.shape, dtype=value.dtype)
                piece.of(mine[key]).copy_(value)
    return whole
