"""Collectives that all ranks have agreed on before: each has a number, the same on every rank.

A rank then says with one byte of a mask that it has submitted one of them again. All ranks add and
drop entries at the same points of the negotiation, so that numbers need no exchange.
"""

from __future__ import annotations

from lightning_ring.horovod.requests import Meta, Metas

CAPACITY = 4096
UNNAMED = "noname."  # calls without a name have another one each time


class Cache:
    """Names, their numbers, and what each rank submitted under them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._own: dict[str, tuple[int, Meta]] = {}  # number, and what this rank submits
        self._metas: dict[str, Metas] = {}  # in the order of adding
        self._names: list[str | None] = []  # by number
        self._free: list[int] = []
        # names and groups whose tensors came in other sizes: they are told each time
        self._changing: set[str] = set()

    @property
    def size(self) -> int:
        """One more than the highest number that was ever given."""
        return len(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._metas

    def number(self, name: str, meta: Meta) -> int | None:
        """The number of a request; `None` if this rank submits something new."""
        found = self._own.get(name)
        return found[0] if found is not None and found[1] == meta else None

    def name(self, number: int) -> str:
        name = self._names[number]
        assert name is not None
        return name

    def metas(self, name: str) -> Metas:
        return self._metas[name]

    @property
    def is_full(self) -> bool:
        return len(self._metas) >= CAPACITY

    @property
    def oldest(self) -> str:
        return next(iter(self._metas))

    def takes(self, name: str, meta: Meta) -> bool:
        """Whether a name is expected again, with tensors of the same size. All members of a
        group get one answer.
        """
        return (
            UNNAMED not in name
            and (meta.group[0] or name) not in self._changing
            and meta.group[1] <= CAPACITY
        )

    def add(self, name: str, metas: Metas) -> None:
        """Number a collective that all ranks have agreed on."""
        number = self._free.pop() if self._free else len(self._names)
        self._names[number : number + 1] = [name]
        self._own[name] = number, metas[self._rank]
        self._metas[name] = metas

    def drop(self, name: str, *, changed: bool = False) -> list[str]:
        """Forget a name, and with it the group in which it was called. Returns their names."""
        group = self._metas[name][self._rank].group
        grouped = [
            other for other, metas in self._metas.items() if metas[self._rank].group == group
        ]
        names = grouped if group[0] else [name]
        for one in names:
            number, _ = self._own.pop(one)
            del self._metas[one]
            self._names[number] = None
            self._free.append(number)
        if changed:
            if len(self._changing) >= CAPACITY:
                self._changing.clear()
            self._changing.add(group[0] or name)
        return names
