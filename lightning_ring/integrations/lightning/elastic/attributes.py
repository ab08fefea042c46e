"""What trainer, module, data module and callbacks keep outside of their states, for processes
that join.
"""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ProgressBar

from lightning_ring.comm.communicator import Communicator

# of ModelCheckpoint: the monotonic clock's time, by which rank 0 decides
_OF_ONE_HOST = ("_last_time_checked",)


def plain_attributes(trainer: pl.Trainer) -> list[dict[str, Any]]:
    """Copies of the numbers and texts, and of lists and dicts of them, in the attributes of each
    part of the fit.

    Of trainer, module and data module these are the public attributes: their private ones are
    Lightning's.
    """
    return [
        {
            name: copy.deepcopy(value)
            for name, value in vars(part).items()
            if (private or name[0] != "_") and _kept(name, value)
        }
        for part, private in _parts(trainer)
    ]


def changed_on_all(
    first: list[dict[str, Any]], trainer: pl.Trainer, comm: Communicator, *, receives: bool
) -> list[dict[str, Any]]:
    """The attributes that training has changed, to the same value on all ranks that do not
    ``receive``. Collective.

    ``first`` are those with which it began. What differs between ranks, such as what only rank 0
    writes, is each rank's own.
    """
    now = plain_attributes(trainer)
    changed = [
        {name: value for name, value in part.items() if name not in before or before[name] != value}
        for part, before in zip(now, first, strict=True)
    ]
    texts = [{name: repr(value) for name, value in part.items()} for part in changed]
    gathered: list[list[dict[str, str]] | None] = comm.all_gather_object(
        None if receives else texts
    )
    of_all = [of_rank for of_rank in gathered if of_rank is not None]
    return [
        {
            name: value
            for name, value in part.items()
            if all(of_rank[at].get(name) == repr(value) for of_rank in of_all)
        }
        for at, part in enumerate(changed)
    ]


def take_attributes(trainer: pl.Trainer, parts: list[dict[str, Any]]) -> None:
    """Set what `changed_on_all` has found on rank 0."""
    for (part, _), values in zip(_parts(trainer), parts, strict=True):
        vars(part).update(values)


def user_callbacks(trainer: pl.Trainer) -> list[Callback]:
    """Without those of this package, which get what they need in other ways, and some of them
    where ranks connect.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [
        callback
        for callback in callbacks
        if not type(callback).__module__.startswith("lightning_ring.")
    ]


def _parts(trainer: pl.Trainer) -> list[tuple[Any, bool]]:
    """Each with whether its private attributes are among them."""
    data = getattr(trainer, "datamodule", None)
    public = [trainer, trainer.lightning_module, *([data] if data is not None else [])]
    private = [
        callback for callback in user_callbacks(trainer) if not isinstance(callback, ProgressBar)
    ]
    return [*((part, False) for part in public), *((part, True) for part in private)]


def _kept(name: str, value: Any) -> bool:
    return name not in _OF_ONE_HOST and name != "training" and _is_plain(value)


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return value is None or type(value) in (bool, int, float, str)
