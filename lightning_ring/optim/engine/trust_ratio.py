"""The step that layer-wise optimizers share: measure norms, sum them over ranks, move the
weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from lightning_ring.optim.engine.fused import FusedRun
from lightning_ring.optim.engine.multi_tensor import MultiTensorRun, grad_square_sum
from lightning_ring.optim.engine.options import (
    RunOptions,
    check_options,
    require,
    require_number,
    way_to_run,
)
from lightning_ring.optim.engine.parameter_list import (
    LOW_PRECISION,
    ParameterBatch,
    ParameterList,
    TensorKind,
    compute_dtype,
    lie_alike,
    parameter_names,
    signature,
)
from lightning_ring.optim.engine.rule import Rule, Scalars, StepNumbers
from lightning_ring.optim.engine.sent_tables import SentTables

GROUP_KEYS = frozenset({"params", "param_names", "initial_lr", "name"})


class TrustRatioOptimizer(Optimizer, Rule):
    """The base of LARS and LAMB; a subclass adds the methods of its `Rule`, defaults and their
    checks.

    Args:
        foreach: True updates many tensors a call, in pieces that fit the cache; False goes
            parameter by parameter.
        fused: True runs one Triton kernel over all parameters, on CUDA. With both None: fused on
            CUDA where Triton is there, else foreach. False for one and None for the other:
            parameter by parameter, as in torch.
        capturable: Keep step counts and learning rate on the device, so that the step can be
            captured in a CUDA graph (give ``lr`` as a tensor on the device to change it between
            replays).
        skip_nonfinite: Where a gradient has a NaN or an infinity, leave all parameters and all
            state untouched, on all ranks alike, and count it in `skipped_steps`. Reads the norm of
            all gradients, which waits for the device.
        master_weights: Keep a float32 copy of bfloat16 and float16 parameters, made at their first
            step, and update that. (State is float32 for them in any case.)

    Attributes:
        skipped_steps: How many steps ``skip_nonfinite`` left out.
        norm_all_reduce: Where every parameter is this rank's slice (1-D, possibly empty) of a
            tensor that is spread over ranks: a function that sums a 1-D tensor over those ranks, in
            place (returning None) or returning the sum. Each step calls it once, with 2 *
            parameters elements (float64; float32 on devices without), and once before that, with 1
            element, where ``max_grad_norm`` or ``skip_nonfinite`` is set; also on a rank where no
            parameter has a gradient. Ranks hold slices of the same tensors in the same order. It
            is not part of ``state_dict()`` and of pickles.

    Gradients are read and never written. ``state_dict()`` can be loaded at any dtype and device:
    state goes to the parameter's device, in float32 for bfloat16 and float16 parameters.
    """

    _parameter_list: ParameterList | None
    _collected: tuple[list[Any], list[ParameterBatch]] | None
    _tables: SentTables

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        options: RunOptions,
    ) -> None:
        self.options = options
        self.norm_all_reduce: Callable[[Tensor], Tensor | None] | None = None
        self._forget_caches()
        self.skipped_steps = 0
        super().__init__(params, defaults)
        all_params = [p for group in self.param_groups for p in group["params"]]
        require(bool(all_params), "no parameters to optimize: every group is empty")
        check_options(options, all_params)

    @staticmethod
    def check_group(group: dict[str, Any]) -> None:
        """Raise `ValueError` for the first argument of ``group`` that is out of range, besides
        ``lr``, ``weight_decay`` and ``eps``.
        """
        raise NotImplementedError

    def hyperparameters(self, group: dict[str, Any]) -> dict[str, Any]:
        """The numbers of ``group`` that `Rule.scalars` needs, with ``lr``, ``maximize`` and
        ``adapt`` among them. The kernels find them by their order.
        """
        return {name: group[name] for name in self.defaults}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        known = GROUP_KEYS | self.defaults.keys()
        unknown = sorted(param_group.keys() - known)
        require(
            not unknown,
            f"a parameter group has the unknown keys {unknown}; known are {sorted(known)}",
        )
        # torch fills in defaults: not in the caller's dict
        super().add_param_group(dict(param_group))
        group = self.param_groups[-1]
        try:
            self._check(group)
            for name, param in zip(parameter_names([group]), group["params"], strict=True):
                require(
                    param.is_floating_point(),
                    f"{name} is {param.dtype}; {type(self).__name__} needs real floats",
                )
        except ValueError:
            del self.param_groups[-1]
            raise

    def _check(self, group: dict[str, Any]) -> None:
        """Raise `ValueError` for the first argument of ``group`` that the constructor would
        refuse.
        """
        for name in ("lr", "weight_decay", "eps"):
            require_number(name, group[name])
        self.check_group(group)
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.device.type != "cpu":
            require(
                self.options.capturable,
                f"lr is a tensor on {lr.device}: pass capturable=True, or lr as a float",
            )

    # -- numbers to read between steps

    @property
    def trust_ratios(self) -> Tensor:
        """Last trust ratio of each parameter, in the order of the groups: 1-D, on the device,
        without waiting for it.

        1 where the parameter does not adapt or a norm was 0; NaN where no step was taken.
        """
        # of parts, where a strategy has the parts of these parameters stepped
        listed = self._parameter_list
        if listed is None or listed.sizes != [len(group["params"]) for group in self.param_groups]:
            listed = self._current_list()
        return listed.ratios.clone()

    # -- the step

    # It does not gain from a compiler, and reads the tensors' memory.
    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Args:
            closure: Re-evaluates the model and returns the loss; it runs with gradients enabled.

        Raises:
            RuntimeError: A gradient is sparse or complex; the message names the parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        listed = self._current_list()
        parts = self._batches(listed)
        if parts or self.norm_all_reduce is not None:
            self.skipped_steps += not self._update(listed, parts)
        return loss

    def _update(self, listed: ParameterList, parts: list[ParameterBatch]) -> bool:
        """Take one step; returns whether it was taken: not where ``skip_nonfinite`` found a NaN or
        an infinity.
        """
        options, over_ranks, clip = self.options, self.norm_all_reduce is not None, None
        if options.max_grad_norm is not None or options.skip_nonfinite:
            squares = listed.ratios.new_zeros(1)
            for part in parts:
                squares += grad_square_sum(part).to(listed.device)
            # Of all ranks together. It is finite where all gradients are.
            grad_norm = self._sum_over_ranks(squares)[0].sqrt()
            if options.skip_nonfinite and not grad_norm.isfinite():
                return False
            if options.max_grad_norm is not None:
                clip = (grad_norm / options.max_grad_norm).clamp(min=1)
        runs = [(self._begin(listed, part, clip), listed.places(part)) for part in parts]
        if over_ranks:
            sums = listed.ratios.new_zeros(2, len(listed.params))
            for run, places in runs:
                run.measure()
                sums[:, places] = run.sums.to(sums)
            sums = self._sum_over_ranks(sums.view(-1)).view_as(sums)
            for run, places in runs:
                run.sums = sums[:, places].contiguous().to(run.sums)
        for run, places in runs:
            ratios = run.move(measured=over_ranks)
            if ratios.data_ptr() != listed.ratios.data_ptr():  # else kernels have written there
                listed.ratios[places] = ratios.to(listed.ratios)
        return True

    def _begin(
        self, listed: ParameterList, part: ParameterBatch, clip: Tensor | None
    ) -> FusedRun | MultiTensorRun:
        """Count one step of the parameters of ``part``; returns the run that takes it."""
        rule, step, device = type(self), None, part.kind.device
        if listed.steps is not None:
            places = listed.places(part, listed.steps.device)
            listed.steps[places] += 1
            step = listed.steps[places]
        clip = None if clip is None else clip.to(device)
        is_fused = part.kind.way == "fused"
        on_device = is_fused or clip is not None or self.options.capturable
        place = device if on_device else torch.device("cpu")
        numbers = [self.hyperparameters(group) for group in self.param_groups]
        hyper, groups = listed.hyper_table(numbers, place), listed.groups_of(part, place)
        if is_fused:
            ratios = listed.ratios[listed.places(part)].to(device)
            return FusedRun(rule, part, listed.tables, groups, hyper, step, clip, ratios)
        h = dict(zip(numbers[0], hyper.index_select(0, groups).unbind(1), strict=True))
        return MultiTensorRun(rule, part, StepNumbers(rule, Scalars(**h), step, clip, device))

    def _sum_over_ranks(self, vector: Tensor) -> Tensor:
        summed = None if self.norm_all_reduce is None else self.norm_all_reduce(vector)
        return vector if summed is None else summed

    def _current_list(self) -> ParameterList:
        if self._parameter_list is None or not self._parameter_list.fits(self.param_groups):
            self._parameter_list = ParameterList(
                self.param_groups, self.counts_steps, self.options.capturable, self._tables
            )
            self._collected = None
        return self._parameter_list

    def _batches(self, listed: ParameterList) -> list[ParameterBatch]:
        """The parameters that have a gradient. To sort them costs the host more than the rest of a
        fused step, so that the batches of the last step are used again if only the values and the
        memory of tensors have changed.
        """
        if self._collected is None or self._collected[0] != signature(listed.params, self.state):
            parts = self._collect(listed)
            self._collected = signature(listed.params, self.state), parts
        grads: list[Any] = [param.grad for param in listed.params]
        return [
            replace(part, grads=[grads[position] for position in part.positions])
            for part in self._collected[1]
        ]

    def _collect(self, listed: ParameterList) -> list[ParameterBatch]:
        """The parameters that have a gradient, grouped so that one launch can update each group;
        without their gradients, as other code counts references to them.
        """
        parts: dict[TensorKind, ParameterBatch] = {}
        for position, param in enumerate(listed.params):
            grad = param.grad
            if grad is None:
                continue
            if grad.layout is not torch.strided or grad.is_complex():
                name = list(parameter_names(self.param_groups))[position]
                found = grad.dtype if grad.is_complex() else f"sparse ({grad.layout})"
                raise RuntimeError(
                    f"{type(self).__name__}: the gradient of {name} is {found}, expected dense "
                    "real floats; pass real parameters, and sparse=False to nn.Embedding"
                )
            weight, states = self._tensors_of(listed, position, param)
            is_flat = lie_alike((param, grad, weight, *states))
            kind = TensorKind(
                param.device,
                compute_dtype(param),
                weight.dtype,
                grad.dtype,
                mirror=None if weight is param else param.dtype,
                way=way_to_run(self.options, param.device, is_flat),
            )
            part = parts.setdefault(kind, ParameterBatch(kind))
            part.positions.append(position)
            part.weights.append(weight)
            part.states.append(states)
            if weight is not param:
                part.mirrors.append(param)
        return list(parts.values())

    def _tensors_of(
        self, listed: ParameterList, position: int, param: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The weight to update (the parameter or its master copy) and its state, made of zeros at
        its first step; ``step`` becomes a view of ``listed.steps``.
        """
        state, weight = self.state[param], param
        for name in self.state_names:
            if name not in state:
                state[name] = torch.zeros_like(param, dtype=compute_dtype(param))
        if self.options.master_weights and param.dtype in LOW_PRECISION:
            if "master" not in state:
                state["master"] = param.detach().float()  # a copy: it has 16 bits
            weight = state["master"]
        if self.counts_steps and state.get("step") is not (view := listed.step_views[position]):
            if "step" in state:
                view.copy_(torch.as_tensor(state["step"]))
            state["step"] = view
        return weight, tuple([state[name] for name in self.state_names])

    # -- saving and loading

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state dict of this class.

        Raises:
            ValueError: An argument in it is out of range, or it is of another optimizer; nothing
                was loaded.
        """
        for index, group in enumerate(state_dict["param_groups"]):
            try:
                missing = sorted(self.defaults.keys() - group.keys())
                require(not missing, f"no {missing}, so it is of another optimizer")
                self._check(group)
            except ValueError as error:
                raise ValueError(
                    f"{type(self).__name__} cannot go on from this state dict: group {index} of it "
                    f"holds {error}. Start without that state, or go on with the optimizer that "
                    "saved it."
                ) from None
        final: dict[str, Any] = {}  # as hooks of others leave it

        def remember(_: Optimizer, state_dict: dict[str, Any]) -> None:
            final.update(state_dict)

        def restore(_: Optimizer) -> None:
            """Put back what torch has rounded to the dtype of a parameter, in its layout."""
            saved_ids = [i for group in final["param_groups"] for i in group["params"]]
            params = [p for group in self.param_groups for p in group["params"]]
            for saved_id, param in zip(saved_ids, params, strict=True):
                for key, value in final["state"].get(saved_id, {}).items():
                    if isinstance(value, Tensor) and key != "step":
                        kept = torch.empty_like(param, dtype=compute_dtype(param))
                        self.state[param][key] = kept.copy_(value)

        with (
            self.register_load_state_dict_pre_hook(remember),
            self.register_load_state_dict_post_hook(restore, prepend=True),
        ):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {
            "options": self.options,
            "skipped_steps": self.skipped_steps,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # torch adds it, and the kernels find hyper-parameters by their order
        self.defaults.pop("differentiable", None)
        self.__dict__.setdefault("norm_all_reduce", None)
        self._forget_caches()
        for group in self.param_groups:
            self._check(group)

    def _forget_caches(self) -> None:
        self._parameter_list = self._collected = None
        self._tables = SentTables()
