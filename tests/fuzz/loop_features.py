"""What a loop by hand may do: through `lightning_ring.distribute`, or with Horovod's API. The
first option is plain.
"""

from tests.fuzz.module_features import EACH, EXTRA, FREEZE, TWO
from tests.fuzz.option import option
from tests.fuzz.trainer_features import (
    AGAIN,
    BUCKETS,
    CLIP,
    COMPRESSION,
    GROUPS,
    OPTIMIZER,
    PRECISION,
)

WINDOW = {  # backwards of a step
    "1": option(3, window="1"),
    "2, the first one local": option(window="2"),
    "2": option(window="2", synced="True", rounding=True),
    "2, clipped after each": option(1.5, window="2", synced="True", clips="True", rounding=True),
}

SCALER = {
    "none": option(3),
    "GradScaler": option(scaler="True"),
    "GradScaler, an overflow on one rank": option(
        scaler="True", loss="if step % 4 == 2 and rank == 1:\n    loss = loss * float('inf')"
    ),
}

FAILURE = {
    "none": option(3),
    "a backward raises on all ranks": option(without="ddp"),  # at the block `Raises`
}

STEPPING = {
    "by hand": option(12),
    "in backward, hooks from before": option(
        without="ddp", parts=EACH, before="step_in_backward(self.optimizers)"
    ),
    "in backward, hooks from after": option(
        without="ddp", parts=EACH, after="step_in_backward(self.optimizers)"
    ),
    "two optimizers": option(2, parts=TWO),
}

BATCHES = {  # of each rank in an epoch
    "even": option(),
    "rank 0 has two more": option(batches="6, 4, 4"),
    "rank 1 has two more": option(batches="4, 6, 2"),
    "rank 1 has two": option(batches="6, 2, 4"),
}

REDUCTION = {
    "mean": option(3),
    "mean, divided before": option(horovod="gradient_predivide_factor=2.0"),
    "sum": option(horovod="op=hvd.Sum", reduction="sum"),
}

LOOP = {
    "precision": PRECISION,
    "optimizer": OPTIMIZER,
    "groups": GROUPS,
    "stepping": STEPPING,
    "window": WINDOW,
    "clip": CLIP,
    "scaler": SCALER,
    "failure": FAILURE,
    "extra": EXTRA,
    "freeze": FREEZE,
    "again": AGAIN,
    "buckets": BUCKETS,
    "compression": COMPRESSION,
}

HOROVOD = {
    "optimizer": OPTIMIZER,
    "groups": GROUPS,
    "window": WINDOW,
    "clip": CLIP,
    "extra": EXTRA,
    "batches": BATCHES,
    "reduction": REDUCTION,
}
