"""Ranks that step alone between two averages: through `distribute` beside torch's own, and
through the Trainer.
"""

import copy
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from lightning_ring import RingStrategy, distribute
from lightning_ring.algorithms.local import DiLoCo, LocalSGD
from lightning_ring.monitor import RingProfile
from tests.checks.loops import batches, loss_of, network
from tests.checks.models import (
    SIZE,
    WORLD,
    Classifier,
    assert_all_ranks_equal,
    loader,
    parameters,
    trainer,
)
from tests.checks.stepping_alone import FabricLoop, Noted, fit_and_save, saved_parameters
from tests.checks.strategy.references import scaler_plugin
from tests.refusals import refused


def check_a_plain_loop_is_that_of_torchs_post_local_sgd_optimizer():
    every, warmup, inputs = 3, 4, batches(12)
    start = network()
    ours, theirs = copy.deepcopy(start), copy.deepcopy(start)
    optimizer = torch.optim.SGD(ours.parameters(), 0.1, momentum=0.9)
    values = []
    with distribute(ours, optimizer, algorithm=LocalSGD(every, warmup_steps=warmup)) as training:
        for batch in inputs:
            loss_of(ours(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(parameters(ours))
        assert_close(
            training.all_reduce(parameters(ours)), (training.show_averages(), parameters(ours))[1]
        )
    assert_all_ranks_equal(parameters(ours))

    group = dist.new_group(backend="gloo")
    wrapped = DistributedDataParallel(theirs, process_group=group)
    wrapped.register_comm_hook(
        PostLocalSGDState(
            group, group, start_localSGD_iter=warmup, post_local_gradient_allreduce=False
        ),
        post_localSGD_hook,
    )
    plain = torch.optim.SGD(theirs.parameters(), 0.1, momentum=0.9)
    # torch averages after steps warmup_steps + 1, + period, ...
    averager = PeriodicModelAverager(every, warmup_steps=warmup + every - 1, process_group=group)
    post_local = PostLocalSGDOptimizer(plain, averager)
    for batch, expected in zip(inputs, values, strict=True):
        loss_of(wrapped(batch)).backward()
        post_local.step()
        post_local.zero_grad()
        assert_close(parameters(theirs), expected, rtol=1e-5, atol=1e-7)
    # local steps
    assert len({WORLD.bcast(values[4].sum().item(), root=rank) for rank in range(SIZE)}) == SIZE


class NotedToTheEnd(Noted):
    def __init__(self):
        super().__init__()
        self.trained = []

    def on_train_end(self):
        self.validated.append(parameters(self))


class NoteOwn(L.Callback):
    """Runs before a checkpoint of the same batch puts averages into place."""

    def on_train_batch_end(self, _, module, *__):
        module.trained.append(parameters(module))


def check_evaluations_and_checkpoints_see_averages_and_resume_within_a_round(tmp_path):
    folder = Path(WORLD.bcast(str(tmp_path)))

    def run(make, name, ckpt_path=None):
        L.seed_everything(5, verbose=False)
        module = NotedToTheEnd()
        limits = {"limit_train_batches": 4, "val_check_interval": 2, "limit_val_batches": 1}
        strategy = RingStrategy(algorithm=make())
        fit_and_save(
            strategy, module, folder / name, ckpt_path=ckpt_path, callbacks=[NoteOwn()], **limits
        )
        return module

    for number, make in enumerate(
        (
            lambda: LocalSGD(every=3, warmup_steps=2),
            lambda: DiLoCo(every=3, outer_lr=0.5),
        )
    ):
        whole = run(make, f"whole {number}")
        for shown in whole.validated:
            assert_all_ranks_equal(shown)
        assert_all_ranks_equal(parameters(whole))
        own = WORLD.allgather(whole.trained[3])  # after step 4, the first epoch's last
        assert not torch.equal(own[0], own[-1])
        path = folder / f"whole {number}" / "epoch=0.ckpt"
        assert_close(saved_parameters(path, whole), torch.stack(own).mean(0), rtol=1e-5, atol=1e-7)
        resumed = run(make, f"resumed {number}", str(path))
        assert len(resumed.trained) == 4
        assert torch.equal(torch.stack(resumed.trained), torch.stack(whole.trained[4:])), number
        assert torch.equal(parameters(resumed), parameters(whole))


def check_averages_over_steps_and_over_epochs_are_those_of_the_ranks_average(tmp_path):
    folder = Path(WORLD.bcast(str(tmp_path)))
    module = NotedToTheEnd()
    callbacks = [NoteOwn(), EMAWeightAveraging(decay=0.5, use_buffers=False)]
    fit_and_save(
        RingStrategy(algorithm=LocalSGD(every=3)), module, folder / "steps", callbacks=callbacks
    )
    means = [
        torch.stack(every).mean(0) for every in zip(*WORLD.allgather(module.trained), strict=True)
    ]
    expected = means[0]
    for mean in means[1:]:
        expected = (expected + mean) / 2
    assert_close(parameters(module), expected, rtol=1e-5, atol=1e-6)
    assert_all_ranks_equal(parameters(module))

    module = NotedToTheEnd()
    over_epochs = StochasticWeightAveraging(0.01, swa_epoch_start=1)
    algorithm = LocalSGD(every=3)
    fit_and_save(
        RingStrategy(algorithm=algorithm),
        module,
        folder / "epochs",
        callbacks=[over_epochs],
        max_epochs=3,
    )
    # three ranks' mean of equal values may be another value's neighbour
    assert_close(parameters(module), parameters(over_epochs._average_model), rtol=1e-6, atol=0)
    assert_all_ranks_equal(parameters(module))


def check_fabric_saves_averages_and_resumes_within_a_round(tmp_path):
    path = WORLD.bcast(str(tmp_path / "saved.ckpt"))
    loop = FabricLoop(LocalSGD(every=3), seed=3)
    own = WORLD.allgather(loop.train(range(4)))
    assert not torch.equal(own[0], own[-1])
    loop.fabric.save(path, loop.state)
    assert_close(parameters(loop.model), torch.stack(own).mean(0), rtol=1e-5, atol=1e-7)
    straight = loop.train(range(4, 8))
    again = FabricLoop(LocalSGD(every=3), seed=9)
    again.fabric.load(path, again.state)
    assert torch.equal(again.train(range(4, 8)), straight)
    again.fabric.strategy.show_averages()
    assert_all_ranks_equal(parameters(again.model))


def check_what_cannot_work_is_refused():
    run = trainer(RingStrategy(algorithm=LocalSGD()), plugins=[scaler_plugin()])
    with refused("loss scaler"):
        run.fit(Classifier(), loader())
    run = trainer(RingStrategy(algorithm=LocalSGD()), callbacks=[RingProfile("profile.json")])
    with refused("cannot record LocalSGD on"):
        run.fit(Classifier(), loader())
    nets = nn.Linear(2, 2), nn.Linear(2, 2)
    both = nn.ModuleList(nets)
    with refused("LocalSGD got 2 optimizers"):
        distribute(
            both, [torch.optim.SGD(net.parameters(), 0.1) for net in nets], algorithm="ring_local"
        )
