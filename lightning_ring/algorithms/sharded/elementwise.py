"""Check that an optimizer is elementwise: the update of an element depends on no other element."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_ring.errors import ConfigurationError
from lightning_ring.optim import LAMB, LARS

ELEMENTWISE = {
    getattr(torch.optim, name)
    for name in (
        "SGD",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "Adagrad",
        "Adadelta",
        "RMSprop",
        "Rprop",
        "ASGD",
    )
} | {LARS, LAMB}  # the norms of these two are summed over ranks
_NOT_ELEMENTWISE = {
    getattr(torch.optim, name, None) for name in ("LBFGS", "SparseAdam", "Adafactor", "Muon")
}
_SHAPES = ((6, 5), (7,))
_STEPS = 12  # some optimizers change after warm-up steps, or at every tenth step


def check_can_be_sharded(optimizer: Optimizer) -> None:
    """Check that ``optimizer`` can step this rank's part of each parameter, and keeps no tensors
    outside its state.

    torch's own optimizers are known. Any other class is tried on small tensors, with the settings
    of each group: one object steps full tensors, two others (as on two ranks) step a part each. A
    class with the attribute ``elementwise = True`` is not tried.
    """
    kind = type(optimizer)
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise _refusal(
            kind,
            "is no torch.optim.Optimizer (or does not call its constructor), whose step has hooks",
        )
    if kind in ELEMENTWISE or getattr(kind, "elementwise", False) is True:
        return
    if kind in _NOT_ELEMENTWISE:
        raise _refusal(kind, "looks at whole tensors, or at all of them together")
    for group in optimizer.param_groups:
        settings = {
            key: value for key, value in group.items() if key not in ("params", "param_names")
        }
        try:
            full, parts = _step_full_and_in_parts(kind, optimizer.defaults, settings)
        except _NotElementwise as why:
            raise _refusal(kind, str(why)) from None
        except Exception as error:
            raise _refusal(
                kind,
                "is not one that lightning_ring knows, and trying it on small tensors raised "
                f"{type(error).__name__}: {error}. If no element's update depends on another "
                "element, set `elementwise = True` on the class",
            ) from error
        if not all(
            torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(full, parts, strict=True)
        ):
            raise _refusal(
                kind, "takes another step for a tensor in two parts than for the whole tensor"
            )


class _NotElementwise(Exception):
    """A trial showed that an optimizer cannot be sharded."""


def _refusal(kind: type, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{kind.__module__}.{kind.__qualname__} cannot be sharded over ranks: it {why}. "
        "Use strategy='ring', where every rank steps whole parameters."
    )


@torch.random.fork_rng(devices=())
def _step_full_and_in_parts(
    kind: type[Optimizer], defaults: dict[str, Any], settings: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    start = [torch.randn(shape, dtype=torch.float64) for shape in _SHAPES]
    gradients = [
        [torch.randn_like(tensor) * 10.0 ** (step % 3 - 1) for tensor in start]
        for step in range(_STEPS)
    ]
    full = _stepped(kind, defaults, settings, start, gradients)
    halves = []
    for half in range(2):
        cut = [_half(tensor, half) for tensor in start]
        cut_gradients = [[_half(gradient, half) for gradient in step] for step in gradients]
        halves.append(_stepped(kind, defaults, settings, cut, cut_gradients))
    together = [torch.cat(parts) for parts in zip(*halves, strict=True)]
    if all(torch.equal(after, before) for after, before in zip(full, start, strict=True)):
        raise RuntimeError(f"{_STEPS} steps did not change a parameter")
    return [tensor.reshape(-1) for tensor in full], together


def _half(tensor: Tensor, half: int) -> Tensor:
    # no cut between two rows
    return tensor.reshape(-1).tensor_split([tensor.numel() * 3 // 5 - 1])[half]


def _stepped(
    kind: type[Optimizer],
    defaults: dict[str, Any],
    settings: dict[str, Any],
    start: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> list[Tensor]:
    params = [Parameter(tensor.clone()) for tensor in start]
    # a warm-up may begin at 0
    group = settings | {"params": params} | ({"lr": 0.01} if "lr" in settings else {})
    optimizer = kind([group], **dict(_accepted(kind, defaults)))
    for step in gradients:
        for param, gradient in zip(params, step, strict=True):
            param.grad = gradient.clone()
        optimizer.step()
    _check_all_is_in_its_state(optimizer)
    return [param.detach() for param in params]


def _check_all_is_in_its_state(optimizer: Optimizer) -> None:
    """Tensors outside the state would neither be sharded nor gathered for a checkpoint."""
    places = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("state", "param_groups")
    }
    for group in optimizer.param_groups:
        places |= {
            f"param_groups[...][{name!r}]": value
            for name, value in group.items()
            if name != "params"
        }
    for name, value in places.items():
        if any(isinstance(leaf, Tensor) and leaf.numel() > 1 for leaf in _leaves(value)):
            raise _NotElementwise(f"keeps tensors in its attribute {name}, and not in its state")


def _leaves(value: Any) -> Iterator[Any]:
    """Values, and keys, in nested dicts, lists, tuples and sets."""
    if isinstance(value, Mapping):
        for pair in value.items():
            yield from _leaves(pair)
    elif isinstance(value, (list, tuple, set)):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def _accepted(kind: type[Optimizer], defaults: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    names = inspect.signature(kind).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
    return ((key, value) for key, value in defaults.items() if takes_any or key in names)
