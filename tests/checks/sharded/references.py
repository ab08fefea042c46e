"""Modules under ``ring_sharded``, and under ``ring`` to compare."""

from tests.checks.models import (
    SIZE,
    Classifier,
    assert_all_ranks_equal,
    parameters,
    relative_difference,
)
from tests.checks.strategy import references
from tests.strategies import ring

CAP = 0.0005  # MiB: about one layer a bucket


def sharded(**kwargs):
    return ring(True, bucket_cap_mb=CAP, **kwargs)


def both(make, train=None, **kwargs):
    """``make()`` trained with sharded and with whole optimizers, from the same seed."""
    strategies = sharded(), ring(False, bucket_cap_mb=CAP)
    return references.both(make, train, strategies=strategies, **kwargs)


def assert_same(mine, reference, tolerance=0.0):
    """``tolerance`` 0 means the same bits, on up to two ranks: with more, additions come in
    another order.
    """
    assert_all_ranks_equal(parameters(mine))
    difference = relative_difference(parameters(mine), parameters(reference))
    limit = max(tolerance, 0.0 if SIZE <= 2 else 1e-5)
    assert difference <= limit, difference


class With(Classifier):
    """A classifier whose optimizer is what ``make(module)`` returns."""

    def __init__(self, make, **kwargs):
        super().__init__(**kwargs)
        self.make = make

    def configure_optimizers(self):
        return self.make(self)
