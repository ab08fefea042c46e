"""Where an elastic fit counts its samples from."""

from types import SimpleNamespace

import pytest
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
)

from lightning_ring.data import PKSampler, ShuffledSampler
from lightning_ring.errors import ConfigurationError
from lightning_ring.integrations.lightning.data import warn_of_padding
from lightning_ring.integrations.lightning.elastic.position import TrainingPosition

BATCH = 4


class OwnBatches(BatchSampler):
    pass


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


DATA, CUT = list(range(8)), {"num_replicas": 2, "rank": 0}
WRAPPED = DistributedSamplerWrapper(RandomSampler(DATA), **CUT)


@pytest.mark.parametrize(
    ("loaders", "found"),
    [
        ([DataLoader(DATA, BATCH), DataLoader(DATA, BATCH)], "This fit has 2 training loaders."),
        ([DataLoader(Stream(), BATCH)], "This one reads Stream, an IterableDataset."),
        (
            [DataLoader(DATA, batch_sampler=OwnBatches(range(8), 2, False))],
            "This one has batch_sampler=OwnBatches(...).",
        ),
        ([DataLoader(DATA, batch_size=None)], "This one has batch_size=None."),
        # as Lightning puts the user's sampler into one of its own
        ([DataLoader(DATA, BATCH, sampler=WRAPPED)], "This one has sampler=RandomSampler(...)."),
        (
            [DataLoader(DATA, BATCH, sampler=DistributedSampler(DATA, **CUT))],
            "This one has sampler=DistributedSampler(...).",
        ),
        (
            [DataLoader(DATA, BATCH)],
            "This one has the SequentialSampler of torch, as "
            "Trainer(use_distributed_sampler=False) leaves it.",
        ),
        ([iter(())], "This one is a tuple_iterator."),
    ],
)
def test_a_loader_without_an_order_for_all_ranks_is_named_as_the_user_wrote_it(loaders, found):
    fit_loop = SimpleNamespace(_combined_loader=SimpleNamespace(flattened=loaders))
    with pytest.raises(
        ConfigurationError, match="An elastic fit needs one training loader"
    ) as error:
        TrainingPosition(SimpleNamespace(fit_loop=fit_loop))
    assert str(error.value).endswith(found)


def test_padding_names_the_sampler_of_the_user():
    ours = DistributedSamplerWrapper(RandomSampler(range(7)), **CUT)
    with pytest.warns(UserWarning, match="by 2 ranks: RandomSampler, cut for the ranks, repeats 1"):
        warn_of_padding(DataLoader(range(7), 1, sampler=ours), 2)


def position(sampler, epoch, batch_idx, limit=1.0):
    """Of a fit whose loader reads ``sampler``, before batch ``batch_idx`` of the epoch."""
    loader = SimpleNamespace(sampler=sampler, batch_size=BATCH)
    loop = SimpleNamespace(batch_idx=batch_idx, batch_progress=SimpleNamespace(is_last_batch=False))
    fit_loop = SimpleNamespace(
        _combined_loader=SimpleNamespace(flattened=[loader]), epoch_loop=loop
    )
    trainer = SimpleNamespace(current_epoch=epoch, fit_loop=fit_loop, limit_train_batches=limit)
    return TrainingPosition(trainer)


def test_a_fit_that_begins_an_epoch_counts_from_its_start():
    sampler = ShuffledSampler(400, rank=0, world_size=2)
    # of the epoch before, which was not read to its end
    sampler.load_state_dict(sampler.state_dict(trained=40))
    found = position(sampler, epoch=1, batch_idx=0)
    found.begin_step()
    found.end_step()
    assert found.state_dict()["after"]["position"] == BATCH * 2


@pytest.mark.parametrize(
    ("done", "limit", "ranks", "has"),
    [(10, 1.0, 8, True), (10, 1.0, 9, False), (5, 0.5, 4, True), (5, 0.5, 5, False)],
)
def test_processes_join_where_each_rank_has_a_batch_left(done, limit, ranks, has):
    """Of 192 samples four ranks make 12 batches each; for five there are 5 more after 5, and
    half of 10 is done.
    """
    sampler = ShuffledSampler(192, remainder="drop")
    with sampler.placed(0, 4):
        sampler.load_state_dict(sampler.state_dict(trained=done * BATCH))
        found = position(sampler, epoch=0, batch_idx=done - 1, limit=limit)
        assert found.has_batches_for(ranks) == has


@pytest.mark.parametrize("epoch", [0, 1])
def test_processes_do_not_join_where_a_step_needs_more_classes_than_there_are(epoch):
    sampler = PKSampler([number // 4 for number in range(48)], p=2, k=2)
    found = position(sampler, epoch=0, batch_idx=-1)
    found._trainer.current_epoch = epoch
    assert found.has_batches_for(6)
    assert not found.has_batches_for(7)
