"""What a Trainer and its callbacks ask of the strategy: ranks, collectives, decisions of all
ranks.
"""

import re

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder

from lightning_ring import RingStrategy
from lightning_ring.errors import CollectiveError, RingError
from tests.checks.marks import by_world_size, on_one_rank
from tests.checks.models import (
    RANK,
    SIZE,
    WORLD,
    Classifier,
    assert_all_ranks_equal,
    fit,
    loader,
    parameters,
    trainer,
)
from tests.checks.strategy.references import assert_like_ddp, both


@by_world_size
def check_sync_dist_and_all_gather():
    class Gathering(Classifier):
        def training_step(self, batch, batch_idx):
            hidden = self.net(batch[0])
            gathered = self.all_gather(hidden, sync_grads=True)
            assert gathered.shape == (SIZE, *hidden.shape)
            self.log("rank", float(RANK), sync_dist=True)
            self.log("highest", float(RANK), sync_dist=True, reduce_fx="max")
            self.log("total", torch.tensor(RANK + 1), sync_dist=True, reduce_fx="sum")
            return F.cross_entropy(gathered.flatten(0, 1), self.all_gather(batch[1]).flatten())

    ring, reference = both(Gathering, max_epochs=1)
    assert_like_ddp(ring, reference)
    metrics = ring.trainer.callback_metrics
    assert metrics["rank"] == (SIZE - 1) / 2
    assert metrics["highest"] == SIZE - 1
    assert metrics["total"] == SIZE * (SIZE + 1) / 2


def check_collectives_of_the_strategy():
    module = Classifier()
    seen = {}

    class Probe(L.Callback):
        def on_train_start(self, trainer, pl_module):
            ring = trainer.strategy
            seen["mean"] = ring.reduce(torch.tensor([RANK, 2 * RANK]), reduce_op="mean")
            seen["sum"] = ring.reduce(torch.tensor(float(RANK)), reduce_op="sum")
            seen["all"] = ring.reduce_boolean_decision(RANK == 0)
            seen["any"] = ring.reduce_boolean_decision(RANK == 0, all=False)
            ring.barrier("named")

    fit("ring", module, callbacks=[Probe()], max_epochs=1)
    total = SIZE * (SIZE - 1) // 2
    torch.testing.assert_close(seen["mean"].float(), torch.tensor([total / SIZE, 2 * total / SIZE]))
    assert seen["sum"] == total
    assert (seen["all"], seen["any"]) == (False, True)


def check_stopping_on_one_rank_alone_is_an_error_on_every_rank():

    class Stopping(Classifier):
        def on_train_batch_end(self, *_):
            self.trainer.should_stop = RANK == 0

    with pytest.raises(CollectiveError, match="different collectives"):
        fit("ring", Stopping(), max_epochs=4)


ON_ONE_RANK = {
    "save_checkpoint": (
        lambda run, folder: run.save_checkpoint(folder / "one.ckpt"),
        "save_checkpoint",
    ),
    "broadcast": (lambda run, _: run.strategy.broadcast({"a": 1}), "strategy.broadcast"),
    "barrier": (lambda run, _: run.strategy.barrier("mine"), "mine"),
    "all_gather": (
        lambda run, _: run.lightning_module.all_gather(torch.ones(3)),
        r"all_gather of torch.float32 \(3,\)",
    ),
    "sync_dist": (
        lambda run, _: run.lightning_module.log("x", 1.0, sync_dist=True, on_step=True),
        '"reduce"',
    ),
    "validate": (
        lambda run, _: run.validate(run.lightning_module, loader(), verbose=False),
        "trainer.validate",
    ),
}


def check_what_one_rank_calls_alone_is_an_error_on_every_rank(tmp_path):
    cases = [*ON_ONE_RANK.items(), ("save_checkpoint", ON_ONE_RANK["save_checkpoint"])]
    for number, (name, (call, expected)) in enumerate(cases):
        alone = number % 2

        class Calling(Classifier):
            def on_train_batch_end(self, outputs, batch, batch_idx):
                if alone == RANK and batch_idx == 1:  # noqa: B023
                    call(self.trainer, tmp_path)  # noqa: B023

        with pytest.raises(RingError) as caught:
            fit("ring" if number % 3 else "ring_sharded", Calling(), max_epochs=1)
        assert re.search(expected, str(caught.value)), (name, str(caught.value))
        if isinstance(caught.value, CollectiveError):
            assert re.search(rf"rank {alone}: [^;]*({expected})", str(caught.value)), str(
                caught.value
            )


def check_early_stopping_decides_alike():
    class Noisy(Classifier):
        def validation_step(self, batch, batch_idx):
            self.log(
                "watched",
                float(self.current_epoch if RANK == 0 else -self.current_epoch),
                sync_dist=False,
            )

    run = fit(
        "ring",
        Noisy(),
        val=loader(),
        max_epochs=6,
        callbacks=[EarlyStopping("watched", patience=1)],
    )
    assert len(set(WORLD.allgather(run.current_epoch))) == 1


def check_learning_rate_finder():
    module = Classifier(lr=1e-3)
    fit(
        "ring",
        module,
        loader(num=480),
        callbacks=[LearningRateFinder(num_training_steps=25)],
        max_epochs=1,
    )
    assert module.lr != 1e-3
    assert len(set(WORLD.allgather(module.lr))) == 1
    assert_all_ranks_equal(parameters(module))


def check_devices_that_disagree_with_the_launcher():
    for devices in (SIZE + 1, 1):
        with pytest.raises(RingError, match=rf"devices={devices}.*{SIZE}"):
            trainer("ring", devices=devices)
        with pytest.raises(RingError, match=rf"devices={devices}.*{SIZE}"):
            trainer(RingStrategy(), devices=devices)
    with pytest.raises(RingError, match="num_nodes=3"):
        trainer("ring", devices=SIZE, num_nodes=3)
    assert trainer("ring").world_size == trainer("ring", devices=SIZE).world_size == SIZE


@on_one_rank
def check_one_rank_communicates_nothing_and_forced_to_it_has_the_same_bits():
    def called(*_, **__):
        raise AssertionError("it communicates")

    module = Classifier()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "broadcast", "barrier", "all_gather", "new_group"):
            patch.setattr(torch.distributed, name, called)
        fit("ring", module, val=loader())
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
    expected = _trained_alone("auto")
    for strategy in ("ring", RingStrategy(force_communication=True)):
        assert torch.equal(_trained_alone(strategy), expected)


def _trained_alone(strategy):
    L.seed_everything(7, verbose=False)
    module = Classifier()
    # as with DDP, Lightning puts a sampler of one replica in; without it both see the data in one
    # order
    fit(strategy, module, use_distributed_sampler=False)
    return parameters(module)


def check_trains_again_after_the_script_destroyed_the_group():
    module = Classifier()
    fit(RingStrategy(backend="gloo"), module, max_epochs=1)
    torch.distributed.destroy_process_group()
    fit(RingStrategy(backend="gloo"), module, max_epochs=1)
    assert torch.distributed.is_initialized()
    assert_all_ranks_equal(parameters(module))
