"""What algorithms share whose ranks step at their own pace (servers, gossip): parts of the
parameters as messages of bytes, which stay the same, and meetings before an evaluation or to stop
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn import Parameter

from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.recording import unrecorded
from lightning_ring.errors import ConfigurationError

_STOP, _PAUSE, _PAUSE_AFTER_STEPS = range(3)
_ALIGNMENT = 16  # bytes: a view of any dtype may begin there


class ParameterPart(NamedTuple):
    """Some of the parameters by number, one after another in a message of bytes."""

    indices: Sequence[int] = ()
    nbytes: int = 0

    def views(self, message: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
        """The memory of each parameter in the uint8 ``message``, with its shape; ``params`` are
        all of them.
        """
        views, offset = [], 0
        for index in self.indices:
            param = params[index]
            memory = message[offset : offset + param.nbytes]
            views.append(memory.view(param.dtype).view(param.shape))
            offset += _aligned_bytes(param)
        return views


def parts_of(params: Sequence[Tensor], num_parts: int) -> list[ParameterPart]:
    """``params`` in parts of about equally many bytes: the largest first, to the part that has
    least. There are no more parts than parameters.
    """
    count = min(num_parts, len(params))
    indices: list[list[int]] = [[] for _ in range(count)]
    ends = [0] * count
    for index in sorted(range(len(params)), key=lambda index: -params[index].nbytes):
        part = ends.index(min(ends))
        indices[part].append(index)
        ends[part] += _aligned_bytes(params[index])
    return [ParameterPart(*part) for part in zip(indices, ends, strict=True)]


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def check_same_parameters(
    params: Sequence[Parameter], first: Sequence[Parameter], algorithm: str
) -> None:
    """Raise `ConfigurationError` if other ``params`` are trained than at the ``first`` batch."""
    if [*map(id, params)] != [*map(id, first)]:
        raise ConfigurationError(
            "parameters were frozen, unfrozen or added after the first batch, and "
            f"{algorithm} goes on with those of it. Begin another training from a checkpoint, or "
            "use strategy 'ring'."
        )


def meet_for_pause(comm: Communicator, *, after_steps: bool) -> bool:
    """Return when every rank is here: whether any of them comes ``after_steps`` since they last
    met. Collective.

    Ranks that want to stop first (`meet_to_stop`) are sent on.
    """
    while _STOP in (wanted := _all_want(_PAUSE_AFTER_STEPS if after_steps else _PAUSE, comm)):
        pass
    return _PAUSE_AFTER_STEPS in wanted


def meet_to_stop(comm: Communicator) -> bool:
    """Whether every rank is here: then all stop at once.

    Else some rank is in `meet_for_pause` already, at the end of its epoch: this one trains on, and
    asks again later.
    """
    return set(_all_want(_STOP, comm)) == {_STOP}


def _all_want(what: int, comm: Communicator) -> list[int]:
    wanted: list[int] = unrecorded(comm).all_gather_object(what, name="meeting")
    return wanted
