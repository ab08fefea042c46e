"""Parameters, buffers and samples: what every rank holds, and that the ranks' models are one."""

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn

from lightning_ring import RingStrategy
from lightning_ring.errors import ModelMismatchError
from lightning_ring.integrations.lightning.whole_weights import OwnCallback
from tests.checks.models import (
    RANK,
    SIZE,
    WORLD,
    Classifier,
    assert_all_ranks_equal,
    fit,
    loader,
    parameters,
    warned_on_rank_0,
)
from tests.checks.strategy.references import assert_like_ddp, both
from tests.checks.world import raised_by_all


def check_buffers_follow_rank_0():
    for when in ("start", "epoch", "step"):

        class Watching(Classifier):
            def on_validation_epoch_start(self):
                self.seen["mean"].append(self.net[1].running_mean.clone())

        module = Watching(batch_norm=True)
        module.seen["mean"] = []
        fit(RingStrategy(broadcast_buffers=when), module, val=loader())
        means = WORLD.allgather(module.seen["mean"][-1].numpy().tobytes())
        assert (len(set(means)) == 1) == (when != "start"), when
        assert_all_ranks_equal(parameters(module))


def check_averages_of_buffers_that_a_callback_puts_in_for_a_validation_follow_rank_0():
    class Watching(Classifier):
        def validation_step(self, batch, batch_idx):
            self.seen["mean"].append(self.net[1].running_mean.clone())

    module = Watching(batch_norm=True)
    module.seen["mean"] = []
    run = fit("ring", module, val=loader(), callbacks=[EMAWeightAveraging(decay=0.5)])
    assert len(set(WORLD.allgather(module.seen["mean"][-1].numpy().tobytes()))) == 1
    assert not any(isinstance(callback, OwnCallback) for callback in run.callbacks)


class Queue(Classifier):
    """Keeps features of its own last batch in a buffer that enters the loss; ``new_tensor``: in
    a new one each step.
    """

    def __init__(self, *, new_tensor):
        super().__init__(batch_norm=True)  # whose statistics are each rank's own
        self.new_tensor = new_tensor
        self.register_buffer("queue", torch.zeros(4, 4))
        # changes alike on all ranks
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))

    def loss(self, batch):
        features = self.net(batch[0])
        loss = F.cross_entropy(features + features @ self.queue.clone(), batch[1])
        newest = torch.cat([features.detach()[:1], self.queue[:-1]])
        if self.new_tensor:
            self.queue = newest
        else:
            self.queue.data.copy_(newest)
        self.number += 1
        return loss


def check_buffers_that_enter_the_loss_follow_rank_0_at_every_step_as_under_ddp():
    for new_tensor in (False, True):
        with warned_on_rank_0(r"buffer\(s\) queue differently"):
            ring, reference = both(lambda new_tensor=new_tensor: Queue(new_tensor=new_tensor))
        assert_like_ddp(ring, reference)
        assert torch.allclose(ring.queue, reference.queue, atol=1e-5)


def check_rank_0_weights_reach_all_before_the_first_step():
    class First(Classifier):
        def on_train_start(self):
            self.first = parameters(self)

    torch.manual_seed(RANK)  # every rank begins elsewhere
    module = First(batch_norm=True)
    expected = WORLD.bcast(parameters(module))
    fit("ring", module)
    assert torch.equal(module.first, expected)


def check_sampler_is_put_in_for_training_and_evaluation():
    module = Classifier()
    run = fit("ring", module, loader(shuffle=True), loader())
    train = WORLD.allgather(module.seen["index"])
    per_epoch = len(train[0]) // 2
    for epoch in range(2):
        batches = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
        assert _in_order(rank[batches] for rank in train) == list(range(48))
    assert train[0][:per_epoch] != train[0][per_epoch:], (
        "the second epoch is shuffled as the first: no set_epoch"
    )
    evaluated = WORLD.allgather(module.seen["eval"][-per_epoch:])
    assert _in_order(evaluated) == list(range(48))
    predictions = run.predict(module, loader())
    assert sorted(torch.cat(WORLD.allreduce(predictions)).tolist()) == list(range(48))
    module.seen["eval"].clear()
    run.test(module, loader(), verbose=False)
    run.validate(module, loader(), verbose=False)
    assert _in_order(WORLD.allgather(module.seen["eval"])) == sorted(2 * list(range(48)))


def _in_order(ranks):
    """The indices of all batches of ``ranks``."""
    return sorted(index for batches in ranks for batch in batches for index in batch)


def check_padding_is_said_once():
    with warned_on_rank_0(r"repeats \d+ of them"):
        fit("ring", Classifier(), loader(num=48 * SIZE + 1), max_epochs=1)


def check_mismatched_models_are_an_error_on_every_rank():
    def wider(module):
        module.net[3] = nn.Linear(16, 5)

    def other_dtype(module):
        module.net[3].half()

    def one_more(module):
        module.extra = nn.Linear(2, 2)

    for change in (wider, other_dtype, one_more):
        module = Classifier()
        if RANK == SIZE - 1:
            change(module)
        with raised_by_all(ModelMismatchError, str(SIZE - 1)):
            fit("ring", module)
