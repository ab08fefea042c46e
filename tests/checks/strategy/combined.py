"""Several training loaders at once: ranks may differ in each, not in how many batches the
training takes.
"""

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_ring import RingStrategy
from lightning_ring.errors import UnevenBatchesError
from tests.checks.models import (
    RANK,
    SIZE,
    Classifier,
    assert_all_ranks_equal,
    fit,
    loader,
    parameters,
)
from tests.checks.strategy.references import assert_like_ddp, both
from tests.checks.strategy.uneven import Stream
from tests.refusals import refused

LAST = RANK == SIZE - 1


class _Several(Classifier):
    """Takes batches of any nesting; `None` where a loader has ended."""

    def training_step(self, batch, batch_idx):
        parts = tree_leaves(batch, is_leaf=_is_batch)
        return sum(self.loss(part) for part in parts if part is not None)


def _is_batch(part):
    return isinstance(part, list) and torch.is_tensor(part[-1])


def _ours(loaders, **kwargs):
    module = _Several()
    run = fit("ring", module, loaders, use_distributed_sampler=False, max_epochs=1, **kwargs)
    assert_all_ranks_equal(parameters(module))
    return run.global_step


def check_uneven_loaders_of_which_the_training_takes_equally_many_batches():
    short, uneven = lambda: loader(16), lambda: loader(32 if LAST else 24)
    assert _ours(CombinedLoader([short(), uneven()], "min_size")) == 4
    assert _ours(CombinedLoader([uneven(), loader(48)], "max_size")) == 12
    # a nested collection: max_size_cycle
    assert _ours({"a": [uneven(), loader(48)], "b": short()}) == 12
    assert _ours([short(), uneven()], limit_train_batches=5) == 5
    arguments = {"use_distributed_sampler": False, "max_epochs": 2}
    loaders = CombinedLoader({"a": loader(16), "b": uneven()}, "min_size")
    assert_like_ddp(*both(_Several, loaders, **arguments))


def check_uneven_combined_loaders_are_an_error_before_the_first_step():
    uneven = loader(16 if LAST else 24)
    for mode in ("min_size", "max_size", "max_size_cycle"):
        other = loader(48 if mode == "min_size" else 8)
        with pytest.raises(UnevenBatchesError, match=rf"rank {SIZE - 1} has 4.*step 4"):
            _ours(CombinedLoader([other, uneven], mode))
    with refused("2 training loaders"):
        fit(
            RingStrategy(uneven="join"),
            _Several(),
            [uneven, loader(8)],
            use_distributed_sampler=False,
        )


def check_combined_streams_are_refused():
    stream = DataLoader(Stream(24), batch_size=4)
    for loaders in (CombinedLoader([stream, loader(24)], "min_size"), [loader(24), stream]):
        with refused("2 training loaders, of which one"):
            _ours(loaders)
