"""An optimizer that steps this rank's shards, and shows full parameters outside of its step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_ring.algorithms.sharded.elementwise import ELEMENTWISE
from lightning_ring.algorithms.sharded.mirrors import Mirrors
from lightning_ring.algorithms.sharded.parameters import ParameterShard, ShardedParameters
from lightning_ring.algorithms.sharded.state import (
    ShardedState,
    State,
    gather_state,
    renamed,
    shard_state,
)
from lightning_ring.comm.replicate import params_of
from lightning_ring.errors import ConfigurationError
from lightning_ring.gradients.backward import around_closure

_sliced: WeakSet[Optimizer] = WeakSet()  # those of all trainings


class SlicedOptimizer:
    """Hooks on one optimizer: inside its step ``param_groups`` holds this rank's shards, elsewhere
    the parameters.

    The optimizer stays the same object, so that schedulers, loss scalers and its attributes keep
    working. A step reads the ``.grad`` of shards, and its state belongs to shards. Between steps
    ``state`` is a `ShardedState`. Parameters outside the buckets (frozen) are not sharded.
    ``stepped`` is called after a step with the changed parameters. A step also steps the shards of
    ``mirrors``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: ShardedParameters,
        stepped: Callable[[list[Parameter]], None],
        mirrors: Mirrors | None,
    ) -> None:
        if optimizer in _sliced:
            raise ConfigurationError(
                f"one {type(optimizer).__name__} steps parameters of several modules that were set "
                "up one by one. 'ring_sharded' cannot shard them together: set up one module that "
                "contains them all, build an optimizer for each, or use 'ring'."
            )
        if isinstance(optimizer.state, ShardedState):
            raise ConfigurationError(optimizer.state.message)
        self.optimizer = optimizer
        self._parameters = parameters
        self._mirrors = mirrors
        self._stepped = stepped
        # of each group, while it holds shards
        self._full_params: list[list[Parameter]] | None = None
        self._changed: list[Parameter] = []
        self._refusal: str | None = None  # message of `ShardedState`; None: its own
        # the optimizer's state, while a `ShardedState` replaces it
        self._hidden_state: State | None = None
        self._unsharded: State = {}  # loaded state of parameters that have no shard yet
        self._sums_norms = hasattr(optimizer, "norm_all_reduce")
        # another class may change a parameter without a gradient, by weight decay for example
        self._skips_unused = type(optimizer) in ELEMENTWISE
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(self._add_unsharded),
        ]
        _sliced.add(optimizer)

    def use_shards(self) -> None:
        """Put this rank's shards, with their gradients, into ``param_groups``. Waits for all
        parameters.
        """
        if self._full_params is not None:  # its last step raised, or called this one
            self.use_parameters()
            self._parameters.end_step(())
        self._parameters.reducer.finish()
        self._parameters.wait()
        self._parameters.follow()
        shards = self._parameters.by_param
        self._full_params, self._changed = [], []
        for group in self.optimizer.param_groups:
            params = group["params"]
            self._full_params.append(params)
            for param in params:
                if (shard := shards.get(param)) is None:
                    continue
                shard.weight.grad = self._parameters.own_gradient(param)
                if param.grad is not None or not self._skips_unused:
                    self._changed.append(param)
            group["params"] = [shards[p].weight if p in shards else p for p in params]
            group["params"] += [self._mirrored[p].weight for p in params if p in self._mirrored]
        self.show_state()
        self._shard_state()
        if self._sums_norms and shards:
            self.optimizer.norm_all_reduce = self._sum_over_ranks  # type: ignore[attr-defined]
        if self._mirrors is None:
            self._parameters.begin_step(type(self.optimizer).__name__)

    def use_parameters(self) -> None:
        if self._full_params is None:
            return
        for group, full in zip(self.optimizer.param_groups, self._full_params, strict=True):
            for part in set(group["params"]) - set(full):
                part.grad = None
            group["params"] = full
        self._full_params = None
        self.hide_state()
        if self._sums_norms:
            self.optimizer.norm_all_reduce = None  # type: ignore[attr-defined]

    def hide_state(self) -> None:
        """Until `show_state`, using sharded state is an error."""
        state = self.optimizer.state
        if not isinstance(state, ShardedState) and any(
            p.weight in state for p in self._parameters.by_param.values()
        ):
            self._hidden_state = state
            self.optimizer.state = ShardedState(self.optimizer, self._refusal)  # type: ignore[assignment]

    def show_state(self) -> None:
        if isinstance(self.optimizer.state, ShardedState):  # else other code has set a state
            assert self._hidden_state is not None
            self.optimizer.state = self._hidden_state  # type: ignore[assignment]
        self._hidden_state = None

    # -- checkpoints

    def state_dict(self, *, is_rank_zero: bool) -> dict[str, Any]:
        """The ordinary, full state dict on the CPU of rank 0; empty on other ranks. Collective."""
        self.use_parameters()
        self.show_state()
        mine, unsharded = self.optimizer.state, self._unsharded
        try:
            self._forget_empty()
            mirrors = {shard.weight for shard in self._mirrored.values()}
            parts = {key: state for key, state in mine.items() if key not in mirrors}
            full = unsharded | gather_state(parts, self._parameters, keep=is_rank_zero)
            if not is_rank_zero:
                return {}
            in_order = [param for param in params_of(self.optimizer) if param in full]
            self.optimizer.state = defaultdict(
                dict, {key: full[key] for key in [*in_order, *(full.keys() - in_order)]}
            )
            self._unsharded = {}
            return self.optimizer.state_dict()
        finally:
            self.optimizer.state, self._unsharded = mine, unsharded
            self.hide_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load an ordinary state dict: hyper-parameters at once, state when the final buckets
        are known.
        """
        self.use_parameters()
        accepted = dict(state_dict)

        def without_state(_: Optimizer, final: dict[str, Any]) -> dict[str, Any]:
            accepted.update(final)  # other hooks and the optimizer itself may have changed it
            return final | {"state": {}}

        hook = self.optimizer.register_load_state_dict_pre_hook(without_state)
        try:
            self.optimizer.load_state_dict(state_dict)
        finally:
            hook.remove()
        saved_ids = [i for group in accepted["param_groups"] for i in group["params"]]
        params = params_of(self.optimizer)
        by_id = dict(zip(saved_ids, params, strict=True))
        self._unsharded = renamed(accepted["state"], by_id)

    def held_state(self) -> State:
        """What this rank has: parts by shard, and by parameter what is not cut."""
        self.use_parameters()
        self.show_state()
        self._forget_empty()
        held = dict(self.optimizer.state) | self._unsharded
        self.hide_state()
        return held

    def replace_state(self, whole: State) -> None:
        """Go on with a whole state, by parameter. It is cut when the buckets are known."""
        self.use_parameters()
        self.show_state()
        self.optimizer.state, self._unsharded = defaultdict(dict), whole

    def release(self) -> None:
        """Remove the hooks. `state_dict` still works."""
        self.use_parameters()
        for hook in self._hooks:
            hook.remove()
        _sliced.discard(self.optimizer)
        self._refusal = (
            f"this {type(self.optimizer).__name__} was already stepped by an earlier training with "
            "'ring_sharded', and each rank holds its part of that state. Build a new optimizer. "
            "To go on with the state, under a Trainer build optimizers in configure_optimizers "
            "and pass ckpt_path; in a loop of your own take it on all ranks from "
            "training.optimizer_state_dict(optimizer), and hand it to load_optimizer_state_dict "
            "of the next training."
        )
        self.show_state()
        self.hide_state()

    # -- in a step

    def put_hooks_inside(self) -> None:
        """Have the hooks of other code run before the shards come, and after they have gone."""
        before: Any = self.optimizer._optimizer_step_pre_hooks
        after: Any = self.optimizer._optimizer_step_post_hooks
        before.move_to_end(self._hooks[0].id)
        after.move_to_end(self._hooks[1].id, last=False)

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        enter = self._parameters.check_step
        return around_closure(args, kwargs, enter=enter, leave=self.use_shards)

    def _after_step(self, *_: Any) -> None:
        # a class whose step calls that of another class has run the hooks of both
        if self._full_params is not None:
            self.use_parameters()
            self._stepped(self._changed)

    def _shard_state(self) -> None:
        """Replace full state by this rank's part, for every parameter that has a shard."""
        self._forget_empty()
        shards = self._parameters.by_param
        # by its constructor, for example
        made = {p: s for p, s in self.optimizer.state.items() if p in shards}
        loaded = {
            p: s
            for p, s in self._unsharded.items()
            if p in shards or not isinstance(p, torch.Tensor)
        }
        self._unsharded = {p: s for p, s in self._unsharded.items() if p not in loaded}
        for param in made:
            del self.optimizer.state[param]
        for param, state in self._cut(made).items():
            self.optimizer.state[param] = state | self.optimizer.state.get(param, {})
        if loaded:
            self._load(self._cut(loaded))

    @property
    def _mirrored(self) -> dict[Parameter, ParameterShard]:
        return self._mirrors.by_param if self._mirrors is not None else {}

    def _cut(self, full: State) -> State:
        mirrored = self._mirrors.cut(full) if self._mirrors is not None else {}
        return shard_state(full, self._parameters.by_param) | mirrored

    def _forget_empty(self) -> None:
        """Drop the empty dicts that reading ``optimizer.state[param]`` creates."""
        for param in [p for p, state in self.optimizer.state.items() if not state]:
            del self.optimizer.state[param]

    def _load(self, loaded: State) -> None:
        # the optimizer's own method knows the dtype and the device of each value
        index = {param: i for i, param in enumerate(params_of(self.optimizer))}
        state = renamed(dict(self.optimizer.state) | loaded, index)
        groups = [
            group | {"params": [index[param] for param in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _sum_over_ranks(self, vector: torch.Tensor) -> None:
        self._parameters.comm.all_reduce_(vector, name="norms").wait()

    def _add_unsharded(self, _: Optimizer, state_dict: dict[str, Any]) -> None:
        if self._unsharded:
            index = {param: i for i, param in enumerate(params_of(self.optimizer))}
            state_dict["state"].update(renamed(self._unsharded, index))
