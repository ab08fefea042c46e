"""The user's optimizer, which steps nothing while servers step in its place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_ring.algorithms.sharded.state import ShardedState
from lightning_ring.errors import RingError

_STATE = (
    "the state of this optimizer is with the parameter servers, which step in its place. For the "
    "full state save a checkpoint (trainer.save_checkpoint, fabric.save), or call "
    "training.optimizer_state_dict(optimizer) on all ranks: rank 0 gets it."
)
_HOW_TO_LOAD = (
    "Load a checkpoint before the first batch by trainer.fit(ckpt_path=...), fabric.load, or, "
    "behind the parameters, training.load_optimizer_state_dict."
)


class StandIn:
    """Hooks on ``optimizer``, from `begin` to `end`: in its step no parameter has a gradient, so
    that it steps none.

    It stays the same object, so that schedulers keep working. Gradients are there everywhere else,
    also inside a closure. Its state is at the servers.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._params: Sequence[Parameter] = ()
        # state of parameters that no server holds
        self._frozen: dict[Parameter, dict[str, Any]] = {}
        self._versions: list[int] = []
        self._hidden: dict[Parameter, Tensor] = {}  # gradients, in a step
        self._hooks: list[Any] = []

    def begin(self, params: Sequence[Parameter]) -> None:
        """``params`` are those that the servers hold from now on."""
        self._params = params
        held = set(map(id, params))
        state = self.optimizer.state
        self._frozen = {param: state[param] for param in state if id(param) not in held}  # type: ignore[misc]
        self.note_parameters()
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._show),
        ]
        self._show()

    def end(self, state: dict[Parameter, dict[str, Any]]) -> None:
        """Take the state back. Its tensors are on the CPU."""
        for hook in self._hooks:
            hook.remove()
        self._show()
        self.optimizer.state = defaultdict(dict)
        if state or self._frozen:
            # which puts tensors where their parameters are
            self.optimizer.load_state_dict(self.state_dict(state))

    def state_dict(self, state: dict[Parameter, dict[str, Any]]) -> dict[str, Any]:
        """The ordinary state dict with the ``state`` of the servers."""
        held = self.optimizer.state
        self.optimizer.state = defaultdict(dict, self._frozen | state)  # type: ignore[arg-type]
        try:
            return self.optimizer.state_dict()
        finally:
            self.optimizer.state = held

    def note_parameters(self) -> None:
        """The parameters hold the servers' weights."""
        self._versions = [param._version for param in self._params]

    # -- in a step

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(self.optimizer.state, ShardedState) and self.optimizer.state:
            raise RingError(
                "the optimizer's state was replaced, by load_state_dict or other code of the "
                "script, while it is with the parameter servers, which would not learn of it. "
                f"{_HOW_TO_LOAD}"
            )
        self._show()  # after a step that raised
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._hide()
            return None

        def closure_with_parameters() -> Any:
            self._show()
            loss = closure()
            self._hide()
            return loss

        if len(args) > 1:
            return (args[0], closure_with_parameters, *args[2:]), kwargs
        return args, kwargs | {"closure": closure_with_parameters}

    def _hide(self) -> None:
        if [param._version for param in self._params] != self._versions:
            raise RingError(
                "parameters were changed since the last step, by load_state_dict or other code of "
                "the script: the parameter servers hold the weights, and would not learn of it. "
                f"{_HOW_TO_LOAD} Change parameters by the optimizer alone; or use algorithm='ring'."
            )
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        self._hidden = {param: param.grad for param in params if param.grad is not None}
        for param in self._hidden:
            param.grad = None
        self.optimizer.state = defaultdict(dict)

    def _show(self, *_: Any) -> None:
        for param, gradient in self._hidden.items():
            param.grad = gradient
        self._hidden = {}
        self.optimizer.state = ShardedState(self.optimizer, _STATE)  # type: ignore[assignment]
