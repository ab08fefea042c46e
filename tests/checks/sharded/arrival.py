"""Whoever reads a parameter under ``ring_sharded`` reads the new one, and forward does not wait
for the others.
"""

import contextlib
import copy

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_ring import RingStrategy
from tests.checks.models import Classifier, fit, loader, parameters, trainer, warned_on_rank_0
from tests.checks.sharded.late import LateRing, Noting, Patient, Tied, run_late
from tests.checks.sharded.references import CAP, assert_same
from tests.strategies import ring


def check_late_parameters_are_waited_for_by_whoever_reads_them():
    L.seed_everything(7, verbose=False)
    start = Tied()
    results = []
    for kind in (LateRing, Patient, None):
        module = copy.deepcopy(start)
        if kind is not None:
            late = run_late(module, kind=kind)
            assert late.algorithm._reads.trusted
            assert len(late.late.gathered) > 6
        else:
            fit(RingStrategy(bucket_cap_mb=CAP), module, loader(24), max_epochs=1)
        results.append(module)
    assert torch.equal(parameters(results[0]), parameters(results[1]))
    assert_same(results[0], results[2])


def check_hooks_between_steps_read_new_values():
    L.seed_everything(7, verbose=False)
    start, sums = Classifier(), []
    for kind in (LateRing, Patient):
        noting = Noting()
        run_late(copy.deepcopy(start), [noting], kind)
        # what watched them is gone
        assert not {"on_train_batch_start", "on_train_batch_end"} & vars(noting).keys()
        sums.append(torch.stack(noting.sums))
    assert torch.equal(sums[0], sums[1])
    assert len(sums[0].unique()) > 4  # they change from step to step


def check_parameters_travel_in_the_order_of_use_while_forward_goes_on():
    # by step and layer: how many buckets were still on their way when it had run
    left = []

    class Layers(Classifier):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)), nn.Linear(8, 4))
            for layer in self.net:
                layer.register_forward_hook(self.note)

        def note(self, *_):
            left[-1].append(len(self.trainer.strategy.algorithm._parameters._gathers))

    module = Layers()
    waits = []

    class Counting(LateRing):
        def training_step(self, *args, **kwargs):
            waits.append(len(self.algorithm._parameters._gathers))
            left.append([])
            return super().training_step(*args, **kwargs)

    strategy = run_late(module, kind=Counting)
    assert waits[0] == 0
    num_buckets = len(strategy.algorithm._parameters.buckets)
    assert set(waits[1:]) == {num_buckets}, waits  # all still on their way
    # a layer waited for its own weight and bias alone, which two buckets hold at most
    for counts in left[1:]:
        assert counts == sorted(counts, reverse=True)
        assert counts[0] >= num_buckets - 2 > 0, (counts, num_buckets)
        assert counts[-1] == 0
    # of the first backward
    parameters = [name for name in strategy.late.gathered if "averages" not in name]
    first = [name.split("(")[1].split(".")[1] for name in parameters[: waits[1]]]
    assert first == sorted(first), first
    assert first[0] == "0"


@torch.jit.script
def doubled(x: Tensor, weight: Tensor) -> Tensor:
    return 2 * torch.mm(x, weight)


def check_reads_that_no_module_waits_for_are_waited_for_before_the_forward():
    class Hidden(Classifier):
        def __init__(self):
            super().__init__()
            self.hidden = nn.Linear(8, 8)

        def loss(self, batch):
            return F.cross_entropy(self.net(doubled(batch[0], self.hidden.weight)), batch[1])

    class Scripted(Classifier):
        def __init__(self):
            super().__init__()
            self.also = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))

        def loss(self, batch):
            return F.cross_entropy(self.net(self.also(batch[0])), batch[1])

    class Attention(Classifier):
        """Reads the weight of its projection without a call of that module."""

        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2)

        def loss(self, batch):
            x = batch[0]
            return F.cross_entropy(self.net(self.attention(x, x, x)[0]), batch[1])

    class ReadEarly(Classifier):
        """Reads a tied weight before the module that holds it is called."""

        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
            self.head.weight = self.table.weight

        def loss(self, batch):
            x = self.head(F.linear(batch[0], self.table.weight))
            return F.cross_entropy(self.net(x + self.table.bias.sum()), batch[1])

    class Metered(Classifier):
        """A metric is a module whose hash changes with its state."""

        def __init__(self):
            super().__init__()
            self.metric = MeanMetric()

        def loss(self, batch):
            loss = super().loss(batch)
            self.metric(loss.detach())
            return loss

    class Stepping(Classifier):
        def optimizer_step(self, *args, **kwargs):
            super().optimizer_step(*args, **kwargs)
            assert all(param.isfinite().all() for param in self.parameters())

    cases = [
        (Hidden, "hidden.weight"),
        (Scripted, "also.0."),
        (Attention, ""),
        (ReadEarly, "table.bias"),
        (Metered, ""),
        (Stepping, ""),
    ]
    for make, told in cases:
        late, plain = make(), make()
        plain.load_state_dict(late.state_dict())
        with warned_on_rank_0(f"{told}.*gets gradients") if told else contextlib.nullcontext():
            strategy = run_late(late)
        assert strategy.algorithm.overlaps == (make is not Stepping)
        fit(RingStrategy(bucket_cap_mb=CAP), plain, loader(24), max_epochs=1)
        # kernels differ in the last bit for a weight that lies within a bucket
        assert_same(late, plain, tolerance=1e-6)


def check_hooks_and_callbacks_see_whole_parameters():
    class Reading(Classifier):
        def read(self, *_):
            assert self.trainer.strategy.algorithm._parameters.complete

        on_train_epoch_end = on_validation_start = on_save_checkpoint = read

        def on_validation_model_eval(self):
            self.read()
            super().on_validation_model_eval()

        def on_validation_model_zero_grad(self):
            self.read()
            super().on_validation_model_zero_grad()

        def val_dataloader(self):
            if self.trainer.global_step:
                self.read()
                reloaded.append(self.trainer.global_step)
            return loader(8)

        def validation_step(self, batch, batch_idx):
            self.read()
            super().validation_step(batch, batch_idx)

    class Ends(Callback):
        def on_train_epoch_end(self, trainer, module):
            module.read()

        def state_dict(self):
            return {"a": 1}

    module = Reading()
    strategy = ring(True, LateRing, bucket_cap_mb=CAP)
    reloaded = []
    run = trainer(
        strategy,
        callbacks=[Ends()],
        max_epochs=2,
        val_check_interval=2,
        reload_dataloaders_every_n_epochs=1,
    )
    run.fit(module, loader(24))
    assert reloaded
    assert strategy.algorithm.overlaps
    assert module.seen["eval"]
    assert [type(callback) for callback in run.callbacks if isinstance(callback, Ends)] == [Ends]
    # the module is left as it was: no storage that other parameters lie in
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in module.parameters())
