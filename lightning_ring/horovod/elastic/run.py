"""`run`: a training function that is called again whenever the ranks have changed."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any, TypeVar

from lightning_ring.elastic.recovery import NUM_ATTEMPTS
from lightning_ring.errors import HostsUpdatedInterrupt
from lightning_ring.horovod.collectives import barrier
from lightning_ring.horovod.context import elastic_views, reset
from lightning_ring.horovod.elastic.state import State

T = TypeVar("T")


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Decorate ``func(state, ...)``, whose first argument is a `State`.

    ``state.sync()`` first hands rank 0's state to all ranks; rank 0 is one of the oldest. When a
    rank dies the others go back to the last commit, call the reset callbacks, and call ``func``
    again; when ranks come they do so without going back. All ranks return together.

    Without ``ringrun --min-ranks`` an error ends the job.
    """
    return run_fn(func, reset)


def run_fn(func: Callable[..., T], reset: Callable[[], None]) -> Callable[..., T]:
    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> T:
        skip_sync = False
        attempts = 0  # after an error that no change of the ranks explains
        while True:
            views = elastic_views()
            members = views.members if views is not None else ()
            try:
                if not skip_sync:
                    state.sync()
                if views is not None:
                    views.has_state = True
                result = func(state, *args, **kwargs)
                if views is not None:
                    # a rank that has returned would be missing if another dies in the last steps
                    barrier()
                return result
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            except Exception as error:
                if views is None or not views.is_over(error) or attempts >= NUM_ATTEMPTS:
                    raise
                state.restore()
                skip_sync = False
            gc.collect()  # optimizers that the function had made
            reset()
            attempts = attempts + 1 if views is not None and views.members == members else 0
            state.on_reset()

    return wrapper
