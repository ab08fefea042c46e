"""torch's store over the steward: no rank serves it, so that any rank may die."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store

from lightning_ring.elastic.member import Member


class StewardStore(Store):
    """The store of the current view of ``member``. Calls raise `GenerationOver` once it is over.

    Keep a reference: torch's own does not keep the Python object. ``wait_seconds`` bounds each wait
    for a key. Bytes travel as the characters of the same numbers: digits stay text, which `add`
    counts on.

    Attributes:
        values: All values that this rank has set or got.
    """

    def __init__(
        self, member: Member, wait_seconds: float, values: list[bytes] | None = None
    ) -> None:
        super().__init__()
        self._member = member
        self._seconds = wait_seconds
        self.values: list[bytes] = [] if values is None else values

    def set(self, key: str, value: str | bytes) -> None:
        self.values.append(_text(value).encode("latin-1"))
        self._member.request({"op": "set", "key": key, "value": _text(value)}, self._seconds)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values = self._member.request({"op": "get", "keys": list(keys)}, self._seconds)
        self.values += (found := [_bytes(value) for value in values])
        return found

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        total: int = self._member.request(
            {"op": "add", "key": key, "value": int(value)}, self._seconds
        )
        return total

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        message = {
            "op": "compare_set",
            "key": key,
            "expected": _text(expected),
            "value": _text(value),
        }
        return _bytes(self._member.request(message, self._seconds))

    def check(self, keys: Sequence[str]) -> bool:
        there: bool = self._member.request({"op": "check", "keys": list(keys)}, self._seconds)
        return there

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        self._member.request({"op": "wait", "keys": list(keys)}, seconds)

    # C++ calls these two names
    def deleteKey(self, key: str) -> bool:
        deleted: bool = self._member.request({"op": "delete", "key": key}, self._seconds)
        return deleted

    def getNumKeys(self) -> int:
        number: int = self._member.request({"op": "count"}, self._seconds)
        return number

    def has_extended_api(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._seconds)

    def clone(self) -> StewardStore:
        return StewardStore(self._member, self._seconds, self.values)


def _text(value: str | bytes) -> str:
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")
