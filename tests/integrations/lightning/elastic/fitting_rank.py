"""A fit whose ranks may die: ``fitting_rank.py FOLDER BACKEND [DEATH ...]``.

A DEATH is NUMBER:STEP:PLACE, with STEP the number of finished optimizer steps. PLACE is
``forward``, ``backward``, ``step``, ``batch_end``, ``validation``, ``save``, ``epoch_end``;
``forward2`` and ``backward2`` are those of the second batch of a step; ``start`` is before the
process connects, and the others then wait for its replacement. With ``setup``, ``train_start`` and
``epoch_start`` STEP is how often the process has entered the fit before. ``between`` is between the
steps of the two optimizers of ``manual``. ``:late`` after a place is half a second later.
``sigterm`` is no death: at the end of a batch the process is asked to stop; with ``join`` for STEP,
when it is about to join.

Each process appends epoch, step, samples and the number of earlier attempts at this step, of each
batch that it reads, to ``FOLDER/NUMBER.log``; step and digest of weights and optimizer state after
each batch to ``FOLDER/NUMBER.steps``; and writes its end to ``FOLDER/NUMBER.json``.

The variable FIT holds a JSON of options. ``samples``: 144 if it is not set. ``loader``: the
training loader is this package's. ``nodes``: so many nodes, which processes take by turns.
``trainer`` and ``strategy``: arguments. ``sharded``: the algorithm. ``misfit``: number of a process
whose model differs. ``callbacks``: further ones, as expressions: of Lightning, and those below.
``dropout``. ``manual``: manual optimization, two optimizers; with ``"accumulates"`` every second
batch adds to the gradients of the one before, whose sums go to ``FOLDER/NUMBER.gradients``.
``momentum``: each training_step lets an encoder follow the first layer. ``scaler``: the first scale
of a loss scaler. ``resume``: a checkpoint. ``late``: number and step of a process that has yet to
learn that all agree to this step when a ``late`` death comes. ``barrier``: number and step, behind
which all ranks call a barrier, and this process has yet to learn that all came to it.
``enters_late``: number of a process that has yet to come out of the first change of ranks.
``wait``: in the step of that number all wait until a newcomer is ready to join, which is process
``newcomer``.
"""

import hashlib
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_ring import ElasticStrategy
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.data import ShuffledSampler, item_loader
from lightning_ring.elastic.recovery import Recovery
from lightning_ring.integrations.lightning.elastic.fit import ElasticFit
from lightning_ring.integrations.lightning.elastic.position import TrainingPosition
from tests.chaos.callbacks import CollectiveInEveryHook  # noqa: F401  for ``callbacks``
from tests.processes import wait_for

FOLDER, BACKEND, DEATHS = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
NUMBER = int(os.environ["RING_MEMBER"])
OPTIONS = json.loads(os.environ["FIT"])
SAMPLES, BATCH, EPOCHS = OPTIONS.get("samples", 144), 4, 2
READY = FOLDER / "newcomer"
ATTEMPTS = Counter()  # by step, how often it was done again
ENTRIES = []


def count_attempts(module):
    go_back = TrainingPosition.go_back

    def counted(position):
        ATTEMPTS[module.global_step] += 1
        return go_back(position)

    TrainingPosition.go_back = counted


def announce_newcomer():
    """When it has set up, and is about to say so."""
    start = Recovery.start

    def announced(recovery):
        if OPTIONS.get("newcomer") == NUMBER:
            if f"{NUMBER}:join:sigterm" in DEATHS:
                os.kill(os.getpid(), signal.SIGTERM)
            READY.touch()
        start(recovery)

    Recovery.start = announced


def agree_late():
    """As where the last message of the commit is still under way."""
    agree = Recovery.agree

    def late(recovery):
        agree(recovery)
        if OPTIONS.get("late") == [NUMBER, (recovery.step or 0) + 1]:
            time.sleep(1.0)
            recovery._generations.communicator.barrier()

    Recovery.agree = late


def enter_late():
    """As where the last message of the first view with other ranks is still under way."""
    enter = ElasticFit.enter

    def late(fit, view, comm):
        again = enter(fit, view, comm)
        if OPTIONS.get("enters_late") == NUMBER and view.generation == 1:
            time.sleep(1.5)
            comm.barrier()
        return again

    ElasticFit.enter = late


def die(step, place):
    if f"{NUMBER}:{step}:{place}:late" in DEATHS:
        time.sleep(0.5)
    elif f"{NUMBER}:{step}:{place}" not in DEATHS:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def barrier(strategy, step):
    """Of all ranks, one of which returns from it later."""
    number, at = OPTIONS.get("barrier", (None, None))
    if step != at:
        return

    def run():
        comm = strategy._comm
        comm.barrier()
        if number == NUMBER:
            time.sleep(1.5)
            comm.barrier()

    strategy.call_together(run)


def begin():
    """With the replacements of those that die before they connect, so that the first view has
    them.
    """
    (FOLDER / f"started{NUMBER}").touch()
    die(0, "start")
    replaced = sum(death.endswith(":start") for death in DEATHS)
    last = int(os.environ["RING_WORLD_SIZE"]) + replaced - 1
    wait_for((FOLDER / f"started{last}").exists, 100)


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"lr": 0.01})
        dropout = nn.Dropout(OPTIONS.get("dropout", 0.1))
        self.net = nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), dropout, nn.Linear(32, 1)
        )
        self.seen = MeanMetric()
        if OPTIONS.get("misfit") == NUMBER:
            self.more = nn.Parameter(torch.zeros(3))
        if "momentum" in OPTIONS:
            self.follower = nn.Linear(8, 32).requires_grad_(False)
        self.digest = ""
        self.net[0].weight.register_post_accumulate_grad_hook(
            lambda _: self.die("backward", batch=True)
        )

    def die(self, place, batch=False):
        accumulate = self.trainer.accumulate_grad_batches
        number = self.trainer.fit_loop.epoch_loop.batch_idx % accumulate + 1 if batch else 1
        die(self.global_step, place + (str(number) if number > 1 else ""))

    def setup(self, stage):
        ENTRIES.append(stage)
        die(len(ENTRIES) - 1, "setup")

    def on_train_start(self):
        die(len(ENTRIES) - 1, "train_start")

    def on_train_epoch_start(self):
        die(len(ENTRIES) - 1, "epoch_start")

    def wait_for_newcomer(self):
        if self.global_step != OPTIONS.get("wait"):
            return
        wait_for(READY.exists, 100)
        time.sleep(4.0)  # it reports now, also on a loaded machine

    def training_step(self, batch, batch_idx):
        if "momentum" in OPTIONS:
            for follower, param in zip(
                self.follower.parameters(), self.net[0].parameters(), strict=True
            ):
                follower.data = follower.data.lerp_(param.data, 0.1) * 0.9
        self.begin(batch)
        return self.loss(batch)

    def begin(self, batch):
        samples = batch[2]
        with (FOLDER / f"{NUMBER}.log").open("a") as log:
            attempt = ATTEMPTS[self.global_step]
            log.write(
                json.dumps([self.current_epoch, self.global_step, samples.tolist(), attempt]) + "\n"
            )
        self.wait_for_newcomer()
        self.die("forward", batch=True)

    def loss(self, batch):
        x, y, _ = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.seen(loss)
        self.log("seen", self.seen, on_epoch=True, on_step=False)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.die("step")

    def on_train_batch_end(self, *_):
        with (FOLDER / f"{NUMBER}.steps").open("a") as log:
            self.digest = digest(self)
            log.write(json.dumps([self.global_step, self.digest]) + "\n")
        self.die("batch_end")
        if f"{NUMBER}:{self.global_step}:sigterm" in DEATHS:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.trainer.fit_loop._should_accumulate():
            return
        barrier(self.trainer.strategy, self.global_step)

    def validation_step(self, batch, batch_idx):
        if batch_idx == 1:
            self.die("validation")
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_save_checkpoint(self, checkpoint):
        self.die("save")

    def on_train_epoch_end(self):
        assert self.digest == digest(self), "a validation that ran again has changed the weights"
        self.die("epoch_end")
        gathered = self.all_gather({"two": torch.ones(2), "one": torch.ones(())})
        assert [part.sum() for part in gathered.values()] == [
            2 * self.trainer.world_size,
            self.trainer.world_size,
        ]

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
        if "newcomer" in OPTIONS:  # a function, which is in no state that a newcomer gets
            total = int(self.trainer.estimated_stepping_batches)
            scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: 1 - step / (2 * total)
            )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Counting(of_lightning.Callback):
    """Communicates every fourth batch, by a count that is in no state; logs metrics of single
    epochs.
    """

    def __init__(self):
        self.count = 0

    def on_train_batch_end(self, trainer, *_):
        self.count += 1
        if self.count % 4 == 0:
            assert trainer.strategy.reduce(torch.ones(()), reduce_op="sum") == trainer.world_size

    def on_validation_epoch_end(self, trainer, module):
        for name in ("rising", "higher"):
            module.log(name, float(trainer.current_epoch), sync_dist=True)
        if trainer.current_epoch == 1:
            module.log("late", 1.0, sync_dist=True)


class Failing(of_lightning.Callback):
    """Raises in the hook ``where`` of process ``number``."""

    def __init__(self, number, where):
        if number == NUMBER:
            setattr(self, where, self.fail)

    def fail(self, *_, **__):
        raise ValueError("only this process fails")


class ManualModule(Module):
    """Steps two optimizers, the second one on what the first one has changed."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.begin(batch)
        accumulates = OPTIONS["manual"] == "accumulates" and batch_idx % 2
        if accumulates:
            left = [param.grad.sum().item() for param in self.net[0].parameters()]
            with (FOLDER / f"{NUMBER}.gradients").open("a") as log:
                log.write(json.dumps([self.global_step, *left]) + "\n")
        for number, optimizer in enumerate(self.optimizers()):
            with optimizer.toggle_model():
                if not accumulates:
                    optimizer.zero_grad()
                self.manual_backward(
                    self.loss(batch) if number else self.net(batch[0]).square().mean()
                )
                optimizer.step()
            self.die("between")
        self.lr_schedulers().step()

    def configure_optimizers(self):
        first = torch.optim.AdamW(self.net[:2].parameters(), lr=0.01)
        second = torch.optim.SGD(self.net[2:].parameters(), lr=0.01, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.StepLR(first, 5, 0.9)]


def digest(module):
    found = hashlib.blake2b(digest_size=8)
    for param in module.parameters():
        found.update(param.detach().numpy().tobytes())
    for optimizer in module.trainer.optimizers if "sharded" not in OPTIONS else ():
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            for value in optimizer.state[param].values():
                found.update(value.numpy().tobytes())
    return found.hexdigest()


def main():
    begin()
    if "nodes" in OPTIONS:
        os.environ["RING_NODE_RANK"] = str(NUMBER % OPTIONS["nodes"])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(SAMPLES))
    manual = "manual" in OPTIONS
    module = ManualModule() if manual else Module()
    scale = OPTIONS.get("scaler", 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 0)
    count_attempts(module)
    announce_newcomer()
    agree_late()
    enter_late()
    algorithm = Sharded() if "sharded" in OPTIONS else None
    trainer = pl.Trainer(
        strategy=ElasticStrategy(
            algorithm=algorithm, backend=BACKEND, **OPTIONS.get("strategy", {})
        ),
        accelerator="cpu",
        logger=CSVLogger(FOLDER, name="csv", flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        callbacks=[
            ModelCheckpoint(
                FOLDER / "checkpoints", monitor="val_loss", save_top_k=2, save_last=True
            ),
            *(eval(one, vars(of_lightning) | globals()) for one in OPTIONS.get("callbacks", [])),
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)] if scale else [],
        **({"max_epochs": EPOCHS} | OPTIONS.get("trainer", {})),
    )
    order = ShuffledSampler(SAMPLES, remainder="drop", seed=3)
    # without drop_last another number of ranks may leave a last batch of one sample, which
    # BatchNorm refuses
    make_loader = item_loader if "loader" in OPTIONS else DataLoader
    loader = make_loader(data, batch_size=BATCH, sampler=order, drop_last=True)
    # two batches of a rank or more
    validated = DataLoader(TensorDataset(*data[:48]), batch_size=BATCH)
    trainer.fit(module, loader, validated, ckpt_path=OPTIONS.get("resume"))
    result = {
        "number": NUMBER,
        "rank": trainer.global_rank,
        "world_size": trainer.world_size,
        "digest": digest(module),
        "step": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "epoch": trainer.current_epoch,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "batches": int(module.net[1].num_batches_tracked) / (2 if manual else 1),
        "scale": scaler.get_scale(),
    }
    (FOLDER / f"{NUMBER}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
