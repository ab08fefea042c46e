"""The server side of `ParameterServer`: a part of the parameters, and how it is stepped.

Sources: Li et al., "Scaling distributed machine learning with the parameter server" (OSDI 2014);
Zheng et al., "Asynchronous stochastic gradient descent with delay compensation" (2017),
arXiv:1609.08326, equation 10.
"""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_ring.comm import sealed
from lightning_ring.comm.waiting import CHECK_SECONDS, ranks_text
from lightning_ring.errors import CollectiveError

_ALIGNMENT = 16  # bytes: a view of any dtype may begin there
TOLD_BYTES = 16  # after the weights of an answer: whether to stop, and the delay
PULL, REST = torch.zeros(1, dtype=torch.uint8), torch.ones(1, dtype=torch.uint8)  # questions

Gradients = Sequence[Tensor | None]  # one for each weight of a server
Settings = dict[tuple[int, str], Any]  # by group and key: learning rates and the like


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


def settings_of(optimizer: Optimizer) -> Settings:
    """All but the parameters of each group, as plain numbers."""
    return {
        (number, key): value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


class WeightServer:
    """The weights of one server, and a twin of the user's ``optimizer`` that steps them on the CPU.

    Args:
        params: All parameters, of which this server has a ``part``.
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
        part: ParameterPart,
        num_workers: int,
        *,
        bulk: bool = False,
        compensation: float | None = None,
    ) -> None:
        self.num_updates = 0
        self.told_to_stop = False  # some worker has asked for it
        self._params, self._part, self._num_workers = params, part, num_workers
        self._bulk, self._compensation = bulk, compensation
        self._settings = settings_of(optimizer)  # of the last push
        self._optimizer, self._weights = _twin(optimizer, [params[index] for index in part.indices])
        self._values = [weight.detach() for weight in self._weights]
        self._changed = threading.Condition()
        # of each worker that has pushed: gradients, settings, whether it asks to stop
        self._round: dict[int, tuple[Gradients, Settings, bool]] = {}
        self._resting: set[int] = set()
        self._pulled = [0] * num_workers  # `num_updates` when each last saw the weights
        # by worker, the weights that it saw then
        self._seen: list[list[Tensor]] = []
        if compensation is not None:
            self._seen = [[each.clone() for each in self._values] for _ in range(num_workers)]
        length = part.nbytes + TOLD_BYTES
        self._answers = [torch.zeros(length, dtype=torch.uint8) for _ in range(num_workers)]

    def state(self) -> list[dict[str, Any]]:
        """The optimizer's state of each weight."""
        return [self._optimizer.state.get(weight, {}) for weight in self._weights]

    def answer(self, worker: int, question: Tensor) -> Tensor:
        """The weights, after the step of a push of a rank if ``question`` is longer than a byte.
        `REST` says that ``worker`` has ended its epoch, and comes back.
        """
        if torch.equal(question, REST):
            with self._changed:
                self._resting.add(worker)
                if len(self._resting) == self._num_workers:
                    self._resting.clear()
            return question
        answer, part, gradients, told = self._answers[worker], self._part, None, []
        if question.numel() > 1:
            given, *told = sealed.loads(bytes(question[part.nbytes :].tolist()))
            views = zip(part.views(question, self._params), given, strict=True)
            gradients = [view if has else None for view, has in views]
        delay = self.push(worker, part.views(answer, self._params), gradients, *told)
        numbers = torch.tensor([int(self.told_to_stop), delay])
        answer[-TOLD_BYTES:].view(torch.int64).copy_(numbers)
        return answer

    def push(
        self,
        worker: int,
        pulled: Sequence[Tensor],
        gradients: Gradients | None = None,
        settings: Settings | None = None,
        asks_to_stop: bool = False,
    ) -> int:
        """Step with ``gradients``, if there are any, and copy the weights from which ``worker``
        goes on into ``pulled``. Its optimizer has ``settings``.

        Returns how many updates by others came between the weights that the worker has seen and its
        own.
        """
        with self._changed:
            delay = self.num_updates - self._pulled[worker]
            if gradients is not None and self._bulk:
                self._round[worker] = gradients, settings or {}, asks_to_stop
                self._finish_round_or_wait()
            elif gradients is not None:
                self.told_to_stop |= asks_to_stop
                self._step(self._compensated(worker, gradients), settings or {})
            self._pulled[worker] = self.num_updates
            for targets in (pulled, *self._seen[worker : worker + 1]):
                torch._foreach_copy_([*targets], self._values)
            return delay

    # -- holding the lock

    def _finish_round_or_wait(self) -> None:
        number = self.num_updates
        if len(self._round) == self._num_workers:
            in_order = [self._round[worker] for worker in range(self._num_workers)]
            gradients, settings, asks = zip(*in_order, strict=True)
            self._round = {}
            self.told_to_stop = any(asks)
            self._step([average(column) for column in zip(*gradients, strict=True)], settings[0])
            self._changed.notify_all()
        while self.num_updates == number:
            if self._resting:
                raise CollectiveError(
                    f"{ranks_text([*self._round])} took a step, while "
                    f"{ranks_text([*self._resting])} had ended its epoch, or evaluates. Give all "
                    "ranks the same number of batches, or use mode='async'."
                )
            self._changed.wait(CHECK_SECONDS)
            self.check()

    def _step(self, gradients: Gradients, settings: Settings) -> None:
        for (number, key), value in settings.items():
            if value != self._settings.get((number, key)):  # else it may be the optimizer's own
                self._optimizer.param_groups[number][key] = value
        self._settings = settings
        for weight, gradient in zip(self._weights, gradients, strict=True):
            weight.grad = gradient
        self._optimizer.step()
        self.num_updates += 1

    @torch.no_grad()
    def _compensated(self, worker: int, gradients: Gradients) -> Gradients:
        """g + λ g ⊙ g ⊙ (w - the weights for which g was computed)."""
        if self._compensation is None:
            return gradients
        return [
            None if g is None else g.addcmul(g * g, weight - seen, value=self._compensation)
            for g, weight, seen in zip(gradients, self._values, self._seen[worker], strict=True)
        ]


def average(gradients: Gradients) -> Tensor | None:
    """Summed in the order of the workers, 16 bits as float32; `None` if no worker has one."""
    given = [gradient for gradient in gradients if gradient is not None]
    if not given:
        return None
    dtype = given[0].dtype
    total = given[0].to(torch.promote_types(dtype, torch.float32), copy=True)
    for gradient in given[1:]:
        total += gradient
    return (total / len(gradients)).to(dtype)


def _twin(optimizer: Optimizer, params: Sequence[Parameter]) -> tuple[Optimizer, list[Parameter]]:
    """An optimizer of the same class, settings and state over copies of ``params``, and these."""
    weights = {param: Parameter(_on_host(param)) for param in params}
    state: dict[Any, dict[str, Any]] = defaultdict(dict)
    for param, weight in weights.items():
        for key, value in optimizer.state.get(param, {}).items():
            state[weight][key] = _on_host(value)
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
    return made, [*weights.values()]


def _on_host(value: Any) -> Any:
    """A copy."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
