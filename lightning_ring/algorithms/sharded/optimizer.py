"""One optimizer that steps this rank's parts of its parameters, and shows the whole ones to everybody else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_ring.algorithms.sharded.parameters import ShardedParameters
from lightning_ring.algorithms.sharded.state import State, StateOfParts, cut_state, gather_state
from lightning_ring.errors import ConfigurationError


class SlicedOptimizer:
    """Hooks on one optimizer: inside its step ``param_groups`` holds this rank's pieces, elsewhere the parameters.

    It stays the same object, so that schedulers, loss scalers and whatever is set on it keep working; what a step reads
    is a piece's ``.grad``, and its state is kept for pieces. Between steps ``state`` is a `StateOfParts`. A parameter
    in no bucket (frozen) stays whole.

    Args:
        stepped: Called after a step with the parameters that it changed.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: ShardedParameters, stepped: Callable[[list[Parameter]], None]
    ) -> None:
        if isinstance(optimizer.state, StateOfParts):
            raise ConfigurationError(optimizer.state.message)
        self.optimizer = optimizer
        self._parameters = parameters
        self._stepped = stepped
        self._whole_params: list[list[Parameter]] | None = None  # of each group, while pieces are in their place
        self._changed: list[Parameter] = []
        self._refusal: str | None = None  # what using the state says; None: that this is for `step()`
        self._parts: State | None = None  # the optimizer's state, while a `StateOfParts` is in its place
        self._uncut: State = {}  # of parameters that have no piece yet: what a checkpoint held
        self._gathering = False
        self._sums_norms = hasattr(optimizer, "norm_all_reduce")
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(self._add_uncut),
        ]

    @property
    def holds_pieces(self) -> bool:
        return self._whole_params is not None

    def put_pieces_in(self) -> None:
        """Have ``param_groups`` hold this rank's pieces, with their gradients; parameters are whole by then."""
        self.take_pieces_out()
        self._parameters.reducer.finish()
        self._parameters.wait()
        self._parameters.follow()
        pieces = self._parameters.by_param
        self._whole_params, self._changed = [], []
        for group in self.optimizer.param_groups:
            self._whole_params.append(group["params"])
            for param in group["params"]:
                if (piece := pieces.get(param)) is None:
                    continue
                piece.weight.grad = self._parameters.own_gradient(param)
                if param.grad is not None:
                    self._changed.append(param)
            group["params"] = [pieces[p].weight if p in pieces else p for p in group["params"]]
        self.show_state()
        self._cut()
        if self._sums_norms and pieces:
            self.optimizer.norm_all_reduce = self._sum_over_ranks  # type: ignore[attr-defined]

    def take_pieces_out(self) -> None:
        if self._whole_params is None:
            return
        for group, whole in zip(self.optimizer.param_groups, self._whole_params, strict=True):
            for part, param in zip(group["params"], whole, strict=True):
                if part is not param:
                    part.grad = None
            group["params"] = whole
        self._whole_params = None
        self.hide_state()
        if self._sums_norms:
            self.optimizer.norm_all_reduce = None  # type: ignore[attr-defined]

    def hide_state(self) -> None:
        """Until `show_state`, using the state is an error, if it is of parts."""
        state = self.optimizer.state
        if not isinstance(state, StateOfParts) and any(p.weight in state for p in self._parameters.by_param.values()):
            self._parts = state
            self.optimizer.state = StateOfParts(self.optimizer, self._refusal)  # type: ignore[assignment]

    def show_state(self) -> None:
        if isinstance(self.optimizer.state, StateOfParts):  # else somebody loaded another one
            assert self._parts is not None
            self.optimizer.state = self._parts  # type: ignore[assignment]
        self._parts = None

    # -- checkpoints

    def state_dict(self, *, is_rank_zero: bool) -> dict[str, Any]:
        """The ordinary state dict of the whole optimizer, on the CPU, on rank 0; empty on the others. Collective."""
        self.take_pieces_out()
        self.show_state()
        try:
            return self._gathered(is_rank_zero=is_rank_zero)
        finally:
            self.hide_state()

    def _gathered(self, *, is_rank_zero: bool) -> dict[str, Any]:
        self._forget_empty()
        state = gather_state(self.optimizer.state, self._parameters, keep=is_rank_zero)
        if not is_rank_zero:
            return {}
        mine, whole = self.optimizer.state, self._uncut | state
        in_order = [param for group in self.optimizer.param_groups for param in group["params"] if param in whole]
        self.optimizer.state = defaultdict(dict, {key: whole[key] for key in [*in_order, *(whole.keys() - in_order)]})
        self._gathering = True
        try:
            return self.optimizer.state_dict()
        finally:
            self._gathering = False
            self.optimizer.state = mine

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take an ordinary state dict: hyper-parameters at once, state when the buckets it is cut along are known."""
        self.take_pieces_out()
        self.optimizer.load_state_dict(state_dict | {"state": {}})
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        by_id = dict(zip(saved_ids, params, strict=True))
        self._uncut = {by_id.get(key, key): value for key, value in state_dict["state"].items()}

    def release(self) -> None:
        """Take the hooks off; `state_dict` still works."""
        self.take_pieces_out()
        for hook in self._hooks:
            hook.remove()
        self._refusal = (
            f"this {type(self.optimizer).__name__} was already stepped by an earlier fit under "
            "strategy='ring_sharded', and each rank holds its part of that state. Build optimizers in "
            "configure_optimizers, and pass ckpt_path to go on with the state of a checkpoint."
        )
        self.show_state()
        self.hide_state()

    # -- what happens in a step

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.put_pieces_in()
            return None

        def closure_with_whole_parameters() -> Any:
            self.take_pieces_out()
            loss = closure()
            self.put_pieces_in()
            return loss

        if len(args) > 1:
            return (args[0], closure_with_whole_parameters, *args[2:]), kwargs
        return args, kwargs | {"closure": closure_with_whole_parameters}

    def _after_step(self, *_: Any) -> None:
        self.take_pieces_out()
        self._stepped(self._changed)

    def _cut(self) -> None:
        """Keep this rank's part of all state that is there for whole parameters which have a piece by now."""
        self._forget_empty()
        if not self._parameters.reducer.settled:
            self._load_uncut()
            return
        pieces = self._parameters.by_param
        made = {p: s for p, s in self.optimizer.state.items() if p in pieces}  # by its constructor, say
        loaded = {p: s for p, s in self._uncut.items() if p in pieces or not isinstance(p, torch.Tensor)}
        if not made and not loaded:
            return
        self._uncut = {p: s for p, s in self._uncut.items() if p not in loaded}
        for param in made:
            del self.optimizer.state[param]
        for param, state in cut_state(made, pieces).items():
            self.optimizer.state[param] = state | self.optimizer.state.get(param, {})
        if loaded:
            self._load(cut_state(loaded, pieces))

    def _forget_empty(self) -> None:
        """Drop what reading ``optimizer.state[param]`` leaves behind there: a `defaultdict` of empty dicts."""
        for param in [p for p, state in self.optimizer.state.items() if not state]:
            del self.optimizer.state[param]

    def _load_uncut(self) -> None:
        """While "auto" has yet to choose buckets every rank steps whole parameters, with the whole of their state."""
        loaded, self._uncut = self._uncut, {}
        if loaded:
            self._load(loaded)

    def _load(self, loaded: State) -> None:
        # through the optimizer's own loading, which knows the dtype and the device that each value belongs on
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        index = {param: i for i, param in enumerate(params)}
        state = {index.get(key, key): value for key, value in (dict(self.optimizer.state) | loaded).items()}
        groups, start = [], 0
        for group in self.optimizer.param_groups:
            stop = start + len(group["params"])
            groups.append(group | {"params": list(range(start, stop))})
            start = stop
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _sum_over_ranks(self, vector: torch.Tensor) -> None:
        self._parameters.comm.all_reduce_(vector, name="norms").wait()

    def _add_uncut(self, _: Optimizer, state_dict: dict[str, Any]) -> None:
        if not self._gathering and self._uncut:
            params = [param for group in self.optimizer.param_groups for param in group["params"]]
            index = {param: i for i, param in enumerate(params)}
            state_dict["state"].update({index.get(key, key): value for key, value in self._uncut.items()})
