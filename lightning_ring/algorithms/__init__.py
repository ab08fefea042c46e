"""Training algorithms, which keep the replicas of a model together. They do not import Lightning.

A new algorithm is one file with a subclass of `Algorithm`, and one line in `ALGORITHMS`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

ALGORITHMS = {  # name of a Lightning strategy: path of its class
    "ring": "lightning_ring.algorithms.averaging.Averaging",
    "ring_sharded": "lightning_ring.algorithms.sharded.Sharded",
    "ring_local": "lightning_ring.algorithms.local.LocalSGD",
}


def algorithm_class(name: str) -> Any:
    """Import the class of `ALGORITHMS` behind ``name``. Reading the table itself needs no torch."""
    module, _, attribute = ALGORITHMS[name].rpartition(".")
    return getattr(import_module(module), attribute)
