"""Whole weights for code that reads them: all parameters arrived, or the average of the ranks' own
ones.

After an exception the other ranks may be gone. The weights are then what this rank has, and a
warning says so.
"""

from __future__ import annotations

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_ring.algorithms import optional
from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.errors import RingError


def wait_parameters(algorithm: Algorithm, *, alone: bool) -> None:
    """Return when all parameters have arrived; ``alone``: after an exception, when they may not."""
    try:
        algorithm.wait_parameters()
    except RingError as error:
        if not alone or not isinstance(algorithm, optional.ShardsState):
            raise
        algorithm.show()
        rank_zero_warn(
            "lightning_ring: after the exception some parameters did not arrive from the ranks "
            f"that stepped them ({type(error).__name__}). On this rank the weights, and a "
            "checkpoint of them, mix those before and after the last step: go on from an earlier "
            "checkpoint."
        )


def show_averages(algorithm: Algorithm, *, alone: bool) -> None:
    """Put the ranks' average into the place of the parameters, where ranks step alone.
    Collective, unless ``alone``.
    """
    if not algorithm.steps_alone:
        return
    if alone:
        rank_zero_warn(
            "lightning_ring: after the exception the weights, and a checkpoint of them, are this "
            "rank's, and not the average of the ranks'. Go on from an earlier checkpoint."
        )
        return
    optional.show_averages(algorithm)
