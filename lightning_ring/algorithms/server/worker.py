"""Parameter servers: ranks push gradients to the servers' optimizer, and pull the weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer, SparseAdam

from lightning_ring.algorithms.algorithm import Algorithm, log
from lightning_ring.algorithms.meeting import meet_for_pause, meet_to_stop
from lightning_ring.algorithms.server.layout import ServerLayout, layouts, write_
from lightning_ring.algorithms.server.server import (
    TOLD_BYTES,
    WeightServer,
    encode,
    settings_of,
    whole_state,
)
from lightning_ring.algorithms.sharded.elementwise import check_can_be_sharded
from lightning_ring.algorithms.sharded.state import ShardedState
from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.recording import unrecorded
from lightning_ring.comm.replicate import check_same_description
from lightning_ring.errors import ConfigurationError, RingError, check_arguments
from lightning_ring.gradients.backward import around_closure

_STATE = (
    "the state of this optimizer is with the parameter servers, which step in its place. For the "
    "full state save a checkpoint (trainer.save_checkpoint, fabric.save), or call "
    "training.optimizer_state_dict(optimizer) on all ranks: rank 0 gets it."
)
_HOW_TO_LOAD = (
    "Load a checkpoint before the first batch by trainer.fit(ckpt_path=...), fabric.load, or, "
    "after the parameters, training.load_optimizer_state_dict."
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
    which it holds a part of the state; learning rates are those of the rank that pushes. Parameters
    are cut into equally long parts; under an optimizer that looks at whole tensors (LARS, Muon,
    ...), whole parameters are spread. The same parameters are trained from the first batch to the
    end.

    Args:
        servers: How many ranks are servers; `None`: all, which then send and receive as many bytes
            each as in a ring.
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
        self.servers = servers
        self.mode = mode
        self.delay_compensation = delay_compensation
        self.steps_together = mode == "bulk"
        if mode == "bulk":
            self.refuses_clipping = (
                "ParameterServer(mode='bulk') averages gradients at its servers: a rank knows its "
                "own alone. Use mode='async', which clips what each rank sends, or "
                "strategy 'ring'."
            )
        self.num_steps = 0
        self._optimizer: Optimizer | None = None
        self._worker: _Worker | None = None
        self._asked_to_stop = self._told_to_stop = False
        self._shown_at = 0  # `num_steps` when all ranks last held the servers' weights
        self._delays: list[int] = []
        self._comm: Communicator | None = None

    # -- begin and end

    def attach(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        comm: Communicator,
        warn: Callable[[str], None] = log.warning,
        inform: Callable[[str], None] = log.info,
    ) -> None:
        if self.servers is not None and self.servers > comm.world_size:
            raise ConfigurationError(
                f"ParameterServer got servers={self.servers}, and the job has {comm.world_size} "
                "rank(s), of which some or all are servers too. Use fewer servers, or None for "
                "all ranks."
            )
        self._module, self._comm = module, comm
        self.set_optimizers(optimizers)

    def set_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        if len(optimizers) > 1 or isinstance(next(iter(optimizers), None), LBFGS | SparseAdam):
            found = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
            raise ConfigurationError(
                f"ParameterServer got the optimizer(s) {found}, and its servers take a step of one "
                "optimizer with each dense gradient that comes. Use one for all parameters, other "
                "than LBFGS and SparseAdam, or strategy 'ring'."
            )
        chosen = optimizers[0] if optimizers else None
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
        groups = self._optimizer.param_groups
        params = [param for group in groups for param in group["params"] if param.requires_grad]
        if self._worker is None:
            comm = unrecorded(self._communicator)
            number = self.servers or comm.world_size
            servers = [index * comm.world_size // number for index in range(number)]
            how = {"bulk": self.mode == "bulk", "compensation": self.delay_compensation}
            self._worker = _Worker(self._optimizer, params, servers, comm, **how)
            self._shown_at = self.num_steps
        elif [*map(id, params)] != [*map(id, self._worker.params)]:
            raise ConfigurationError(
                "parameters were frozen, unfrozen or added after the first batch, and the servers "
                "hold those that were trained in it. Save a checkpoint and begin another training "
                "with it, or use strategy 'ring'."
            )

    def _end(self, *, wait: bool = True, keep_state: bool = True) -> None:
        """Collective with ``wait``: the optimizer has its state again."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close(wait=wait, keep_state=wait and keep_state)

    # -- a step

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        if optimizer is self._optimizer:
            return
        params = (param for group in optimizer.param_groups for param in group["params"])
        if not set(self._module.parameters()).isdisjoint(params):
            raise ConfigurationError(
                f"a {type(optimizer).__name__} that ParameterServer does not know is about to step "
                "parameters that its servers hold. Give the one optimizer of all parameters to "
                "distribute() or setup()."
            )

    def after_step(self, optimizer: Optimizer) -> None:
        if self._worker is None or optimizer is not self._optimizer:
            return
        self.num_steps += 1
        told, delay = self._worker.exchange(self._asked_to_stop, self.num_steps)
        self._told_to_stop |= bool(told)
        self._delays.append(delay)

    def show_averages(self) -> None:
        """Have all ranks go on from the servers' weights."""
        if not self.steps_together and self._worker is None:
            self.begin_batch()  # a rank that has had no batch may be a server
        if self._worker is None:
            return
        if self.steps_together:
            self._worker.rest()
        stepped = meet_for_pause(self._communicator, after_steps=self._shown_at != self.num_steps)
        if stepped and not self.steps_together:
            self._worker.pull()
        self._shown_at = self.num_steps

    def clip_grad_norm_(
        self, parameters: Iterable[Parameter], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        if why := self.refuses_clipping:
            raise ConfigurationError(f"gradients were about to be clipped by their norm, but {why}")
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    @property
    def _communicator(self) -> Communicator:
        assert self._comm is not None, "attach() comes first"
        return self._comm

    # -- checkpoints

    def optimizer_state_dict(self, optimizer: Any, *, is_rank_zero: bool) -> dict[str, Any]:
        if self._worker is not None and optimizer is self._optimizer:
            return self._worker.state_dict(keep=is_rank_zero)
        state: dict[str, Any] = optimizer.state_dict() if is_rank_zero else {}
        return state

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
        if not self._told_to_stop or self._worker is None:
            return False
        if not self.steps_together:
            if not meet_to_stop(self._communicator):
                return False
            self._worker.server.told_to_stop = False  # nobody asks it meanwhile
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
            f" to {self.servers or self._communicator.world_size} server(s), which step {when}. "
            "Evaluations, checkpoints and the end of the training see the servers' weights"
        )


class _Worker:
    """This rank beside the servers: pushes and pulls, and the user's optimizer, which steps nothing
    meanwhile.

    The optimizer stays the same object, so that schedulers keep working. In its step no parameter
    has a gradient; everywhere else gradients are there, also inside a closure. Building one is
    collective.

    Args:
        params: What the servers hold, from the values and the state on their ranks.
        servers: Their ranks.
        how: Arguments of `WeightServer`.

    Raises:
        ModelMismatchError: Ranks train different parameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params: list[Parameter],
        servers: Sequence[int],
        comm: Communicator,
        **how: Any,
    ) -> None:
        shapes = [(tuple(param.shape), param.dtype) for param in params]
        check_same_description({"trained parameters": str(shapes)}, comm)
        self.params, self._optimizer, self._comm = params, optimizer, comm
        parts = layouts(params, len(servers), cut=_is_elementwise(optimizer))
        # there may be fewer whole parameters than servers
        self._layouts = {
            rank: part for rank, part in zip(servers, parts, strict=True) if part.pieces
        }
        mine = self._layouts.get(comm.rank, ServerLayout((), 0))
        self.server = WeightServer(optimizer, params, mine, comm.world_size, **how)
        held = set(map(id, params))
        self._unheld = {key: value for key, value in optimizer.state.items() if id(key) not in held}
        self._hidden: dict[Parameter, Tensor] = {}  # gradients, in a step
        self._questions = dict.fromkeys(self._layouts, torch.empty(0, dtype=torch.uint8))
        self._requests = comm.open_requests(self.server.answer)
        self.server.check = self._requests.check
        self._requests.start()
        self._note_parameters()
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._show),
        ]
        self._show()

    def exchange(self, asks_to_stop: bool, step: int) -> list[int]:
        """Push this rank's gradients, and pull. Returns whether to stop, and the delay."""
        settings = settings_of(self._optimizer)
        for rank, layout in self._layouts.items():
            self._questions[rank] = encode(
                self._questions[rank], layout, self.params, settings, asks_to_stop
            )
        return self._ask(self._questions, f"push and pull of step {step}")

    def pull(self) -> None:
        """Replace parameters by the servers' weights, the same on all ranks. Collective."""
        question = torch.zeros(1, dtype=torch.uint8)
        self._ask(dict.fromkeys(self._layouts, question), "pull")
        self._comm.barrier(name="servers")  # until then nobody pushes

    def rest(self) -> None:
        """Tell the servers that this worker has ended its epoch."""
        question = torch.empty(0, dtype=torch.uint8)
        self._requests.ask(dict.fromkeys(self._layouts, (question,)), "pause").wait()

    def _ask(self, questions: dict[int, Tensor], name: str) -> list[int]:
        answers = self._requests.ask(
            {rank: (question,) for rank, question in questions.items()},
            name,
            lengths={rank: (part.nbytes + TOLD_BYTES,) for rank, part in self._layouts.items()},
        ).wait()
        for rank, layout in self._layouts.items():
            views = layout.views(answers[rank], self.params)
            write_(self.params, zip(layout.pieces, views, strict=True))
        self._note_parameters()
        first = answers[next(iter(self._layouts))]
        told: list[int] = first[-TOLD_BYTES:].view(torch.int64).tolist()
        return told

    def state_dict(self, *, keep: bool) -> dict[str, Any]:
        """The optimizer's ordinary state dict, with the state on the CPU; empty without ``keep``.
        Collective.
        """
        states = []
        for rank, layout in self._layouts.items():
            mine = self.server.state() if rank == self._comm.rank else None
            theirs = self._comm.broadcast_object(mine, src=rank, name="state of a server")
            if keep and theirs is not None:
                states.append((layout, theirs))
        if not keep:
            return {}
        self._optimizer.state = defaultdict(dict, self._unheld | whole_state(self.params, states))
        try:
            return self._optimizer.state_dict()
        finally:
            self._show()

    def close(self, *, wait: bool, keep_state: bool) -> None:
        """Give the optimizer its state back with ``keep_state``, which is collective."""
        try:
            state = self.state_dict(keep=True) if keep_state else None
        finally:
            self._requests.close(wait=wait)
            for hook in self._hooks:
                hook.remove()
            self._show()
            self._optimizer.state = defaultdict(dict)
        if state is not None:
            self._optimizer.load_state_dict(state)  # which puts tensors to their parameters

    def _note_parameters(self) -> None:
        """The parameters hold the servers' weights."""
        self._versions = [param._version for param in self.params]

    # -- in a step of the user's optimizer

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(self._optimizer.state, ShardedState) and self._optimizer.state:
            raise RingError(
                "the optimizer's state was replaced, by load_state_dict or other code of the "
                "script, while it is with the parameter servers, which would not learn of it. "
                f"{_HOW_TO_LOAD}"
            )
        self._show()  # after a step that raised
        return around_closure(args, kwargs, enter=self._show, leave=self._hide)

    def _hide(self) -> None:
        if [param._version for param in self.params] != self._versions:
            raise RingError(
                "parameters were changed since the last step, by load_state_dict or other code of "
                "the script: the parameter servers hold the weights, and would not learn of it. "
                f"{_HOW_TO_LOAD} Change parameters by the optimizer alone; or use strategy 'ring'."
            )
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._hidden[param], param.grad = param.grad, None
        self._optimizer.state = defaultdict(dict)

    def _show(self, *_: Any) -> None:
        for param, gradient in self._hidden.items():
            param.grad = gradient
        self._hidden = {}
        self._optimizer.state = ShardedState(self._optimizer, _STATE)  # type: ignore[assignment]


def _is_elementwise(optimizer: Optimizer) -> bool:
    """Whether the step of an element depends on no other one, so that a parameter may lie on
    several servers.
    """
    if hasattr(optimizer, "norm_all_reduce"):  # LARS, LAMB: norms of whole parameters
        return False
    try:
        check_can_be_sharded(optimizer)
    except ConfigurationError:
        return False
    return True
