"""Parameters whose memory is shared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_ring.errors import ConfigurationError


def is_held_elsewhere(tensor: Tensor) -> bool:
    """Whether another tensor, array or process shares the memory of ``tensor``.

    Examples: ``alias = param.data``, ``param.data = other``, ``torch.from_numpy(array)``,
        ``param.share_memory_()``.
    """
    storage = tensor.untyped_storage()
    alone = torch.empty(1, dtype=tensor.dtype, device=tensor.device).untyped_storage()
    # the tensor holds it too
    return not storage.resizable() or num_holders(storage) > 1 + num_holders(alone)


def num_holders(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


def check_no_aliases(module: nn.Module, others: Iterable[tuple[str, Parameter]] = ()) -> None:
    """Raise `ConfigurationError` if a trainable parameter shares memory with another tensor.

    It compares the parameters and buffers of ``module``, and ``others``: parameters that have left
    the module but are still stepped. Parameters move into the memory of their bucket, and the other
    tensor would keep the old values.
    """
    end, before, moves = (torch.device("cpu"), 0), "", False
    for device, start, stop, name, trainable in sorted(
        _places(module, others), key=lambda place: (str(place[0]), place[1])
    ):
        if device == end[0] and start < end[1] and (trainable or moves):
            raise ConfigurationError(
                f"{before} and {name} are two tensors in the same memory. Under "
                "strategy='ring_sharded' parameters move into buckets, which would untie them. "
                "Make them one Parameter (decoder.weight = encoder.weight), or use "
                "strategy='ring'."
            )
        if device != end[0] or stop > end[1]:
            end, before, moves = (device, stop), name, trainable


def _places(
    module: nn.Module, others: Iterable[tuple[str, Parameter]]
) -> Iterator[tuple[torch.device, int, int, str, bool]]:
    """Device, first byte, byte after the last, name and trainability of each tensor of
    ``module``.
    """
    own: list[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    known = {id(tensor) for _, tensor in own}
    for name, tensor in (
        *own,
        *((f"an earlier {name}", param) for name, param in others if id(param) not in known),
    ):
        if tensor.layout == torch.strided and tensor.numel() and not tensor.is_meta:
            extent = 1 + sum(
                (size - 1) * stride
                for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
            )
            start = tensor.data_ptr()
            trainable = isinstance(tensor, Parameter) and tensor.requires_grad
            yield tensor.device, start, start + extent * tensor.element_size(), name, trainable
