"""Broadcasts of parameters, buffers and optimizer state in a few flat messages, and the check
that models are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter, is_lazy
from torch.optim import Optimizer

from lightning_ring.comm.calls import by_rank
from lightning_ring.comm.communicator import Communicator, ReduceOp
from lightning_ring.errors import ConfigurationError, ModelMismatchError

MESSAGE_BYTES = 250 * 1024 * 1024
AVERAGED_BYTES = 25 * 1024 * 1024
SHOWN = 4  # differences in an error
FROZEN = ", frozen"


def broadcast_module(module: nn.Module, comm: Communicator, src: int = 0) -> None:
    """Replace every parameter and buffer by rank ``src``'s, in place; shared ones travel once.

    The ranks' modules must have equal shapes: `check_same_model` first.

    Raises:
        ConfigurationError: A parameter or buffer holds no values yet (meta device, lazy) or is
            sparse.
    """
    named = dict(chain(module.named_parameters(), module.named_buffers()))
    _require_values(named)
    broadcast_tensors(named.values(), comm, src)


def broadcast_buffers(module: nn.Module, comm: Communicator, src: int = 0) -> None:
    """Replace every buffer (such as BatchNorm's running statistics) by rank ``src``'s, in place."""
    named = dict(module.named_buffers())
    _require_values(named)
    broadcast_tensors(named.values(), comm, src)


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], comm: Communicator, src: int = 0) -> None:
    """Replace ``tensors`` (same shapes and dtypes on all ranks, any strides) by rank ``src``'s,
    in place.
    """
    if comm.world_size == 1:
        return
    for message in _messages(tensors, MESSAGE_BYTES):
        if len(message) == 1 and message[0].is_contiguous():
            comm.broadcast_(message[0], src=src, name="replicate").wait()
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in message])
        comm.broadcast_(flat, src=src, name="replicate").wait()
        if comm.rank != src:
            _take_apart(flat, message)


@torch.no_grad()
def average_tensors(tensors: Iterable[Tensor], comm: Communicator, name: str) -> None:
    """Replace ``tensors`` (same shapes and dtypes on all ranks) by their averages over the ranks,
    in place.
    """
    started = []
    for index, message in enumerate(_messages(tensors, AVERAGED_BYTES)):
        flat = torch.cat([tensor.reshape(-1) for tensor in message])
        work = comm.all_reduce_(flat, op=ReduceOp.AVG, name=f"{name}, message {index}")
        started.append((work, flat, message))
    for work, flat, message in started:
        work.wait()
        _take_apart(flat, message)


def _take_apart(flat: Tensor, message: list[Tensor]) -> None:
    parts = flat.split([tensor.numel() for tensor in message])
    shaped = [part.view(each.shape) for part, each in zip(parts, message, strict=True)]
    torch._foreach_copy_(message, shaped)


def _messages(tensors: Iterable[Tensor], max_bytes: int) -> Iterator[list[Tensor]]:
    """Tensors of one dtype and device together, up to ``max_bytes``; what is longer travels
    alone.
    """
    open_messages: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in map(_without_repeats, tensors):
        if tensor.numel() == 0:
            continue
        message = open_messages.setdefault((tensor.dtype, tensor.device), [])
        if message and sum(other.nbytes for other in message) + tensor.nbytes > max_bytes:
            yield list(message)
            message.clear()
        message.append(tensor)
    yield from open_messages.values()


def _without_repeats(tensor: Tensor) -> Tensor:
    """One of each element that `Tensor.expand` repeats: several places of one memory cannot be
    written.
    """
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor.detach()


def _require_values(named: dict[str, Tensor]) -> None:
    for name, tensor in named.items():
        if is_lazy(tensor) or tensor.is_meta:
            state = "lazy" if is_lazy(tensor) else "on the meta device"
            raise ConfigurationError(
                f"{name} holds no values yet (it is {state}), so one rank's cannot be sent to the "
                "others. Materialise the model first: run one batch through lazy modules, or call "
                "to_empty() and initialise."
            )
        if tensor.layout is not torch.strided:
            raise ConfigurationError(
                f"{name} is stored as {tensor.layout}; only dense parameters and buffers are sent."
            )


# --- optimizer state


def params_of(optimizer: Optimizer) -> list[Parameter]:
    """Of all groups, in their order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def broadcast_optimizer_state(
    optimizer: Optimizer,
    comm: Communicator,
    src: int = 0,
) -> None:
    """Replace the optimizer's state and its groups' values by rank ``src``'s; ranks that have none
    yet get it.

    Tensors keep their dtype (`Optimizer.load_state_dict` would cast them to the parameter's).

    Raises:
        ModelMismatchError: The ranks' optimizers differ in kind or in the parameters of their
            groups.
    """
    if comm.world_size == 1:
        return
    check_same_optimizer(optimizer, comm)
    params = params_of(optimizer)
    state = {
        index: optimizer.state[param]
        for index, param in enumerate(params)
        if param in optimizer.state
    }
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    device = params[0].device if params else torch.device("cpu")
    tensors: list[Tensor] = []

    def take_out(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return _TensorSpec.of(value)
        return value

    def put_in(value: Any) -> Any:
        if isinstance(value, _TensorSpec):
            value = value.empty(device)
            tensors.append(value)
        return value

    # What is no tensor is pickled; the tensors follow by themselves.
    outline = _mapped((state, groups), take_out) if comm.rank == src else None
    outline = comm.broadcast_object(outline, src=src, name="optimizer state")
    if comm.rank != src:
        state, groups = _mapped(outline, put_in)
    broadcast_tensors(tensors, comm, src)
    if comm.rank != src:
        for index, param in enumerate(params):
            optimizer.state.pop(param, None)
            if index in state:
                optimizer.state[param] = state[index]
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Nested dicts, lists and tuples with each value in them changed."""
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change) for item in value)
    return change(value)


@dataclass(frozen=True, slots=True)
class _TensorSpec:
    """Stands for a tensor in what is pickled."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    on_accelerator: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _TensorSpec:
        # dense, also of a tensor that repeats elements
        strides = torch.empty_like(tensor, device="meta").stride()
        return cls(tensor.dtype, tuple(tensor.shape), strides, tensor.device.type != "cpu")

    def empty(self, device: torch.device) -> Tensor:
        """In the sender's order of memory: sums over it (LAMB's norms) then have the same bits
        on all ranks.
        """
        on = device if self.on_accelerator else "cpu"
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=on)


def check_same_optimizer(optimizer: Optimizer, comm: Communicator) -> None:
    """Compare the optimizer's class and the number of parameters in each of its groups over all
    ranks.

    Raises:
        ModelMismatchError: They differ; the message is the same on every rank.
    """
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    kinds = comm.all_gather_object(
        f"{type(optimizer).__name__} with {sizes} parameters in its groups",
        name="kinds of optimizers",
    )
    if len(set(kinds)) > 1:
        raise ModelMismatchError(
            f"the ranks have different optimizers: {by_rank(kinds)}. Build the same on all."
        )


# --- are the models the same?


def check_same_model(module: nn.Module, comm: Communicator) -> None:
    """Compare names, shapes, dtypes, devices and ``requires_grad`` of all parameters and buffers
    over all ranks.

    Raises:
        ModelMismatchError: They differ; the message is the same on every rank.
        ConfigurationError: They agree, but hold no values yet (see `broadcast_module`).
    """
    check_same_description(_description(module), comm)
    _require_values(dict(chain(module.named_parameters(), module.named_buffers())))


def check_same_description(description: dict[str, str], comm: Communicator) -> None:
    """Raise the same `ModelMismatchError` on every rank if the ranks' descriptions differ."""
    if (
        comm.world_size > 1
        and len(set(comm.all_gather_object(_digest(description), name="digests of models"))) > 1
    ):
        raise ModelMismatchError(_difference(comm.all_gather_object(description, name="models")))


def digest_of_model(module: nn.Module) -> str:
    """Of all that `check_same_model` compares."""
    return _digest(_description(module))


def _digest(description: dict[str, str]) -> str:
    return hashlib.blake2b(repr(description).encode()).hexdigest()


def _description(module: nn.Module) -> dict[str, str]:
    return described("parameter", module.named_parameters()) | described(
        "buffer", module.named_buffers()
    )


def described(kind: str, named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Text about each tensor (dtype, shape, device, frozen or not), by ``kind`` and name."""
    found = {}
    for name, tensor in named:
        shape = "not initialised" if is_lazy(tensor) else tuple(tensor.shape)
        text = f"{str(tensor.dtype).removeprefix('torch.')} {shape} on {tensor.device.type}"
        frozen = kind == "parameter" and not tensor.requires_grad
        found[f"{kind} {name}"] = text + (FROZEN if frozen else "")
    return found


def _difference(descriptions: list[dict[str, str]]) -> str:
    names = list(dict.fromkeys(chain.from_iterable(descriptions)))
    texts = {name: [described.get(name, "missing") for described in descriptions] for name in names}
    different = [name for name, row in texts.items() if len(set(row)) > 1]
    counts = [f"{len(described)} parameters and buffers" for described in descriptions]
    lines = [f"{name}: {by_rank(texts[name])}" for name in different[:SHOWN]]
    if len(different) > SHOWN:
        lines.append(f"and {len(different) - SHOWN} more")
    if not different:
        at = next(i for i, row in enumerate(zip(*descriptions, strict=True)) if len(set(row)) > 1)
        lines = [
            f"they come in another order, from number {at}: "
            f"{by_rank([list(d)[at] for d in descriptions])}"
        ]
    if len(set(counts)) > 1:
        lines.insert(0, by_rank(counts))
    return (
        "the ranks hold different models, and cannot be trained as one: "
        + ". ".join(lines)
        + ". Build the model "
        "from the same code and configuration on every rank."
    )
