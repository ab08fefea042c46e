"""Training algorithms: how the replicas of a model are kept together. Without Lightning.

A new algorithm is one file with a subclass of `Algorithm`, and one line in `ALGORITHMS`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

ALGORITHMS = {  # the strategy that Lightning knows by this name, and the class that it trains with
    "ring": "lightning_ring.algorithms.averaging.Averaging",
    "ring_sharded": "lightning_ring.algorithms.sharded.Sharded",
}


def algorithm_class(name: str) -> Any:
    """The class of `ALGORITHMS` behind ``name``; imported now, since the table is read before torch is needed."""
    module, _, attribute = ALGORITHMS[name].rpartition(".")
    return getattr(import_module(module), attribute)
