"""The keys and values through which the ranks of one view meet, as torch's stores have them.
Nothing here blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Answer = Callable[[dict[str, Any]], None]


class KeyValue:
    """Values are texts. A request is a message with ``"op"``; its answer may come later, or be a
    refusal.

    ``get`` and ``wait`` are answered once their keys are there; all others at once.
    """

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._waiting: list[tuple[dict[str, Any], Answer]] = []

    def request(self, message: dict[str, Any], answer: Answer) -> None:
        """Call ``answer`` with ``{"value": ...}``, or with ``{"refused": reason}``."""
        op = message["op"]
        if op in ("get", "wait"):
            self._waiting.append((message, answer))
        elif op == "set":
            self._values[message["key"]] = message["value"]
            answer({"value": None})
        elif op == "add":
            total = int(self._values.get(message["key"], "0")) + message["value"]
            self._values[message["key"]] = str(total)
            answer({"value": total})
        elif op == "compare_set":
            answer(
                {"value": self._compare_set(message["key"], message["expected"], message["value"])}
            )
        elif op == "check":
            answer({"value": self._has(message["keys"])})
        elif op == "delete":
            answer({"value": self._values.pop(message["key"], None) is not None})
        elif op == "count":
            answer({"value": len(self._values)})
        else:
            answer({"refused": f"the store knows no operation {op!r}"})
        self._answer_waiting()

    def close(self, reason: str) -> None:
        """Refuse what waits. Later requests belong to another `KeyValue`."""
        waiting, self._waiting = self._waiting, []
        for _, answer in waiting:
            answer({"refused": reason})
        self._values.clear()

    def _compare_set(self, key: str, expected: str, value: str) -> str:
        """As torch's: an absent key takes ``value`` only if nothing (``""``) is expected."""
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            self._values[key] = current = value
        return expected if current is None else current

    def _has(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def _answer_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for message, answer in waiting:
            if not self._has(message["keys"]):
                self._waiting.append((message, answer))
            elif message["op"] == "get":
                answer({"value": [self._values[key] for key in message["keys"]]})
            else:
                answer({"value": None})
