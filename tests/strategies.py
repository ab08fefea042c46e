"""A `RingStrategy` whose gradients travel alike with whole and with sharded optimizers."""

from lightning_ring import RingStrategy
from lightning_ring.algorithms.sharded import Sharded


def ring(sharded, kind=RingStrategy, **arguments):
    """``bucket_cap_mb`` and ``compression`` go to the algorithm if it is `Sharded`."""
    if sharded:
        wire = {name: arguments.pop(name, None) for name in ("bucket_cap_mb", "compression")}
        arguments["algorithm"] = Sharded(**wire)
    return kind(**arguments)
