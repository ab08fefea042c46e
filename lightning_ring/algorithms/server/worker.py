"""Parameter servers: ranks push gradients to the servers' optimizer, and pull the weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer, SparseAdam

from lightning_ring.algorithms.algorithm import Algorithm, Tell, log
from lightning_ring.algorithms.hooks import steps_module
from lightning_ring.algorithms.own_pace import (
    ParameterPart,
    check_same_parameters,
    meet_for_pause,
    meet_to_stop,
    parts_of,
)
from lightning_ring.algorithms.server.server import (
    PULL,
    REST,
    TOLD_BYTES,
    Settings,
    WeightServer,
    settings_of,
)
from lightning_ring.algorithms.sharded.state import ShardedState
from lightning_ring.comm import sealed
from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.recording import unrecorded
from lightning_ring.comm.replicate import check_same_description, params_of
from lightning_ring.comm.requests import Requests
from lightning_ring.errors import ConfigurationError, RingError, check_arguments
from lightning_ring.gradients.backward import around_closure

_STATE = (
    "the state of this optimizer is with the parameter servers, which step in its place. For the "
    "full state save a checkpoint (trainer.save_checkpoint, fabric.save), or call "
    "training.optimizer_state_dict(optimizer) on all ranks: rank 0 gets it."
)
_HOW_TO_LOAD = (
    "the parameter servers would not learn of it. Load a checkpoint before the first batch by "
    "trainer.fit(ckpt_path=...), fabric.load, or, after the parameters, "
    "training.load_optimizer_state_dict."
)


class ParameterServer(Algorithm):
    """Servers hold the weights w and step them with the gradients that ranks send. At its step each
    rank sends its gradient g to all servers, and goes on from the weights that they send back:

        bulk     w ← the optimizer's step with the mean of all ranks' g, once all have come
        async    w ← its step with g as it comes

    ``bulk`` trains as ``strategy="ring"``. In ``async`` g was computed for weights that others have
    changed since; with ``delay_compensation`` λ the step is taken with

        g + λ · g ⊙ g ⊙ (w - w_r)      where w_r are the weights that the rank had pulled

    A server is a thread of its rank, which also trains. Its optimizer is a twin of the user's, of
    which it holds a part of the state; learning rates are those of the rank that pushes. Whole
    parameters are spread over the servers. The same ones are trained from the first batch to the
    end. The user's optimizer steps nothing meanwhile, but stays the same object, so that schedulers
    keep working: in its step no parameter has a gradient, except inside a closure.

    Args:
        servers: How many ranks are servers; `None`: all, which then send and receive as many bytes
            each as in a ring. An optimizer that looks at several parameters together needs 1.
        mode: As above.
        delay_compensation: λ, for ``"async"``; the paper takes 0.04 with learning rates from 0.5
            down.

    In ``"async"`` ranks may take different numbers of steps in an epoch. Evaluations and
    checkpoints see the servers' weights, from which all ranks go on. Each push is a step of the
    optimizer: N ranks take N times as many steps as with ``"bulk"``, and learning rates are not
    scaled.

    `metrics` has ``delay``: the updates by others between a rank's pull and its push, on average
    since it was read.

    Raises:
        ConfigurationError: An argument cannot work.
    """

    sharded: ClassVar[bool] = True
    steps_alone: ClassVar[bool] = True

    def __init__(
        self,
        servers: int | None = None,
        mode: Literal["bulk", "async"] = "bulk",
        *,
        delay_compensation: float | None = None,
    ) -> None:
        check_arguments(
            "ParameterServer",
            (servers is None or (type(servers) is int and servers >= 1))
            and mode in ("bulk", "async")
            and (delay_compensation is None or (delay_compensation > 0 and mode == "async")),
            "1 or more servers, or None for all ranks; mode 'bulk' or 'async'; and with 'async', "
            "where gradients are late, a delay_compensation above 0, such as 0.04, or None",
            servers=servers,
            mode=mode,
            delay_compensation=delay_compensation,
        )
        self.servers, self.mode, self.delay_compensation = servers, mode, delay_compensation
        self.steps_together = mode == "bulk"
        if mode == "bulk":
            self.refuses_clipping = (
                "ParameterServer(mode='bulk') averages gradients at its servers: a rank knows its "
                "own alone. Use mode='async', which clips what each rank sends, or "
                "strategy 'ring'."
            )
        self.num_steps = 0
        self._optimizer: Optimizer | None = None
        self._requests: Requests | None = None  # to the servers, from the first batch on
        self._asked_to_stop = self._told_to_stop = False
        self._shown_at = 0  # `num_steps` when all ranks last held the servers' weights
        self._delays: list[int] = []
        self._hidden: dict[Parameter, Tensor] = {}  # gradients, in a step

    # -- begin and end

    def attach(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        comm: Communicator,
        warn: Tell = log.warning,
        inform: Tell = log.info,
    ) -> None:
        if self.servers is not None and self.servers > comm.world_size:
            raise ConfigurationError(
                f"ParameterServer got servers={self.servers}, and the job has {comm.world_size} "
                "rank(s), which are the servers too. Use fewer servers, or None for all ranks."
            )
        self._module, self._comm = module, unrecorded(comm)
        self.set_optimizers(optimizers)

    def set_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        chosen = next(iter(optimizers), None)
        if len(optimizers) > 1 or isinstance(chosen, LBFGS | SparseAdam):
            found = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
            raise ConfigurationError(
                f"ParameterServer got the optimizer(s) {found}, and its servers step one optimizer "
                "with dense gradients. Use one, not LBFGS or SparseAdam, or strategy 'ring'."
            )
        if chosen is not self._optimizer:
            self._end()
            self._optimizer = chosen

    def detach(self, *, wait: bool = True) -> None:
        self._end(wait=wait)
        self._optimizer = None

    def begin_batch(self, active_ranks: int | None = None) -> None:
        """Collective at first: the servers begin with the state of a checkpoint, if there is
        one.
        """
        if self._optimizer is None:
            return
        params = [param for param in params_of(self._optimizer) if param.requires_grad]
        if self._requests is None:
            self._begin(self._optimizer, params)
        else:
            check_same_parameters(params, self._params, "ParameterServer")

    def _begin(self, optimizer: Optimizer, params: list[Parameter]) -> None:
        comm = self._comm
        shapes = [(tuple(param.shape), param.dtype) for param in params]
        check_same_description({"trained parameters": str(shapes)}, comm)
        number = self.servers or comm.world_size
        ranks = [index * comm.world_size // number for index in range(number)]
        self._params = params
        self._parts = dict(zip(ranks, parts_of(params, number), strict=False))  # by server
        self._questions = dict.fromkeys(self._parts, torch.empty(0, dtype=torch.uint8))
        self._server = WeightServer(
            optimizer,
            params,
            self._parts.get(comm.rank, ParameterPart()),
            comm.world_size,
            bulk=self.mode == "bulk",
            compensation=self.delay_compensation,
        )
        held = set(map(id, params))
        self._unheld = {key: value for key, value in optimizer.state.items() if id(key) not in held}
        self._versions = [param._version for param in params]  # with the servers' weights
        self._shown_at = self.num_steps
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_own_step),
            optimizer.register_step_post_hook(self._show),
        ]
        self._show()
        self._requests = comm.open_requests(self._server.answer)
        self._server.check = self._requests.check
        self._requests.start()

    def _end(self, *, wait: bool = True, keep_state: bool = True) -> None:
        """Collective with ``wait``: the optimizer has its state again."""
        optimizer, requests, state = self._optimizer, self._requests, None
        if requests is None or optimizer is None:
            return
        try:
            if wait and keep_state:
                state = self.optimizer_state_dict(optimizer, is_rank_zero=True)
        finally:
            self._requests = None
            requests.close(wait=wait)
            for hook in self._hooks:
                hook.remove()
            self._show()
            optimizer.state = defaultdict(dict)
        if state is not None:
            optimizer.load_state_dict(state)  # which puts tensors to their parameters

    # -- a step

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        if optimizer is self._optimizer:
            return
        if steps_module(optimizer, self._module):
            raise ConfigurationError(
                f"a {type(optimizer).__name__} that ParameterServer does not know is about to step "
                "parameters that its servers hold. Give the one optimizer of all parameters to "
                "distribute() or setup()."
            )

    def after_step(self, optimizer: Optimizer) -> None:
        if self._requests is None or optimizer is not self._optimizer:
            return
        self.num_steps += 1
        settings = settings_of(optimizer)
        for rank in self._parts:
            self._note_gradients(rank, settings)
        told, delay = self._ask(self._questions, f"push and pull of step {self.num_steps}")
        self._told_to_stop |= bool(told)
        self._delays.append(delay)

    @torch.no_grad()
    def _note_gradients(self, rank: int, settings: Settings) -> None:
        """Make them the question to the server ``rank``, in the memory of the last one if that is
        as long.
        """
        part, question = self._parts[rank], self._questions[rank]
        gradients = [self._params[index].grad for index in part.indices]
        has = [gradient is not None for gradient in gradients]
        text = sealed.dumps((has, settings, self._asked_to_stop))
        if question.numel() != part.nbytes + len(text):
            question = torch.zeros(part.nbytes + len(text), dtype=torch.uint8)
            self._questions[rank] = question
        for view, gradient in zip(part.views(question, self._params), gradients, strict=True):
            if gradient is not None:
                view.copy_(gradient.to_dense())
        question[part.nbytes :] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def show_averages(self) -> None:
        """Have all ranks go on from the servers' weights."""
        if not self.steps_together and self._requests is None:
            self.begin_batch()  # a rank that has had no batch may be a server
        if self._requests is None:
            return
        if self.steps_together:  # the servers learn that this rank has ended its epoch
            self._requests.ask(dict.fromkeys(self._parts, (REST,)), "pause").wait()
        stepped = meet_for_pause(self._comm, after_steps=self._shown_at != self.num_steps)
        if stepped and not self.steps_together:
            self._ask(dict.fromkeys(self._parts, PULL), "pull")
            self._comm.barrier(name="servers")  # until then nobody pushes
        self._shown_at = self.num_steps

    @torch.no_grad()
    def _ask(self, questions: dict[int, Tensor], name: str) -> list[int]:
        """Replace parameters by the answers. Returns whether to stop, and the delay."""
        assert self._requests is not None
        answers = self._requests.ask(
            {rank: (question,) for rank, question in questions.items()},
            name,
            lengths={rank: (part.nbytes + TOLD_BYTES,) for rank, part in self._parts.items()},
        ).wait()
        for rank, part in self._parts.items():
            own: list[Tensor] = [self._params[index] for index in part.indices]
            torch._foreach_copy_(own, part.views(answers[rank], self._params))
        self._versions = [param._version for param in self._params]
        first = answers[next(iter(self._parts))]
        told: list[int] = first[-TOLD_BYTES:].view(torch.int64).tolist()
        return told

    def clip_grad_norm_(
        self, parameters: Iterable[Parameter], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        if why := self.refuses_clipping:
            raise ConfigurationError(f"gradients were about to be clipped by their norm, but {why}")
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    # -- in a step of the user's optimizer

    def _before_own_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not isinstance(optimizer.state, ShardedState) and optimizer.state:
            raise RingError(
                "the optimizer's state was replaced, by load_state_dict or other code of the "
                f"script: {_HOW_TO_LOAD}"
            )
        self._show()  # after a step that raised
        return around_closure(args, kwargs, enter=self._show, leave=self._hide)

    def _hide(self) -> None:
        assert self._optimizer is not None
        if [param._version for param in self._params] != self._versions:
            raise RingError(
                "parameters were changed since the last step, by load_state_dict or other code of "
                f"the script: {_HOW_TO_LOAD} Change parameters by the optimizer alone; or use "
                "strategy 'ring'."
            )
        for param in params_of(self._optimizer):
            if param.grad is not None:
                self._hidden[param], param.grad = param.grad, None
        self._optimizer.state = defaultdict(dict)

    def _show(self, *_: Any) -> None:
        assert self._optimizer is not None
        for param, gradient in self._hidden.items():
            param.grad = gradient
        self._hidden = {}
        self._optimizer.state = ShardedState(self._optimizer, _STATE)  # type: ignore[assignment]

    # -- checkpoints

    def optimizer_state_dict(self, optimizer: Any, *, is_rank_zero: bool) -> dict[str, Any]:
        if self._requests is None or self._optimizer is None or optimizer is not self._optimizer:
            plain: dict[str, Any] = optimizer.state_dict() if is_rank_zero else {}
            return plain
        state: defaultdict[Any, Any] = defaultdict(dict, self._unheld)
        for rank, part in self._parts.items():
            mine = self._server.state() if rank == self._comm.rank else []
            theirs = self._comm.broadcast_object(mine, src=rank, name="state of a server")
            for index, of_parameter in zip(part.indices, theirs, strict=True):
                if of_parameter:
                    state[self._params[index]] = of_parameter
        if not is_rank_zero:
            return {}
        self._optimizer.state = state
        try:
            return self._optimizer.state_dict()
        finally:
            self._show()

    def load_optimizer_state_dict(self, optimizer: Any, state: dict[str, Any]) -> None:
        self._end(keep_state=False)
        if state:
            optimizer.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> str:
        self._end()  # parameters were loaded too
        self.num_steps = self._shown_at = state.get("num_steps", 0)
        return ""

    # -- requests to stop, progress

    def ask_to_stop(self, asked: bool = True) -> None:
        self._asked_to_stop = asked

    def agreed_to_stop(self) -> bool:
        if not self._told_to_stop or self._requests is None:
            return False
        if not self.steps_together:
            if not meet_to_stop(self._comm):
                return False
            self._server.told_to_stop = False  # nobody asks it meanwhile
        self._told_to_stop = False
        return True

    def progress(self) -> str:
        return f"step {self.num_steps}"

    def metrics(self) -> dict[str, float]:
        delays, self._delays = self._delays, []
        return {"delay": sum(delays) / len(delays)} if delays and self.mode != "bulk" else {}

    def description(self) -> str:
        when = "once all ranks have sent theirs" if self.mode == "bulk" else "with each as it comes"
        return (
            f" to {self.servers or self._comm.world_size} server(s), which step {when}. "
            "Evaluations, checkpoints and the end of the training see the servers' weights"
        )
