"""A rank of `chaos.py`: a fit with faults planted in it."""

import faulthandler
import functools
import hashlib
import json
import os
import signal
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ring import ElasticStrategy
from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.algorithms.sharded.mirrors import Mirrors
from lightning_ring.algorithms.sharded.state import ShardedState
from lightning_ring.data import ShuffledSampler
from lightning_ring.elastic import generations
from lightning_ring.elastic.recovery import Recovery
from lightning_ring.elastic.store import StewardStore
from lightning_ring.gradients.delivery import WholeAverages
from lightning_ring.integrations.lightning.elastic import fit as elastic_fit
from lightning_ring.integrations.lightning.elastic.checkpoints import MemoryCheckpoint
from lightning_ring.integrations.lightning.elastic.position import TrainingPosition
from tests.chaos import host as chaos_host
from tests.chaos.callbacks import MAKERS, CollectiveInEveryHook
from tests.chaos.plan import BATCH, EPOCHS, SAMPLES


class Faults:
    """Carries out those of this process, each once."""

    def __init__(self, folder, number, faults):
        self._folder, self._number = folder, number
        self._own = [fault for fault in faults if fault.number == number]
        self.step = lambda: 0

    def reach(self, place):
        for fault in list(self._own):
            if fault.place == place and self.step() >= fault.step:
                self._own.remove(fault)
                self._carry_out(fault)

    def _carry_out(self, fault):
        kind = fault.kind
        if kind == "oom" and not chaos_host.limit_memory():
            kind = "kill"
        full = {"disk": self._folder / "disk", "shm": Path("/dev/shm")}.get(kind)
        if full is not None and not chaos_host.is_small(full):
            return  # everybody's
        place = fault.place.split()[0]
        with (self._folder / f"{self._number}.fault").open("a") as log:
            log.write(f"{self._number} {os.uname().nodename} {place} {kind}\n")
        if kind == "exit":
            os._exit(9)
        elif kind == "oom":
            chaos_host.run_out_of_memory()
        elif full is not None:
            chaos_host.fill(full)
        elif kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        else:
            self._ask(kind, fault.seconds)

    def _ask(self, kind, seconds):
        """Have the driver of the job do it, while this process stays where it is."""
        ask = self._folder / f"{self._number}.ask"
        written = ask.with_suffix(".asking")
        written.write_text(
            json.dumps({"kind": kind, "host": os.uname().nodename, "seconds": seconds})
        )
        written.rename(ask)
        while not ask.with_suffix(".done").exists():
            time.sleep(0.001)
        ask.with_suffix(".done").unlink()

    def plant(self, owner, name, place):
        """Reach ``place`` before each call of the function ``name`` of ``owner``."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def reaching(*args, **kwargs):
            self.reach(place)
            return function(*args, **kwargs)

        setattr(owner, name, reaching)


class Module(pl.LightningModule):
    def __init__(self, faults, folder, number, plan):
        super().__init__()
        self.plan = plan
        self.backbone = nn.Sequential(
            nn.Linear(8, 32),
            # weight averaging would train one more epoch for its statistics
            nn.Identity() if "swa" in plan.callbacks else nn.BatchNorm1d(32),
            *(nn.ReLU(), nn.Dropout(0.1)),
        )
        self.head = nn.Linear(32, 1)
        self._entries, self._logged_step = 0, 0
        self.faults = faults
        self.attempts = Counter()
        self.samples_log, self.steps_log = folder / f"{number}.samples", folder / f"{number}.steps"
        for index, param in enumerate(self.parameters()):
            param.register_post_accumulate_grad_hook(
                lambda _, index=index: faults.reach(f"gradient {index}")
            )

    def training_step(self, batch, batch_idx):
        x, y, samples = batch
        generation, attempt = self._view.generation, self.attempts[self.global_step]
        entry = [self.current_epoch, self.global_step, generation, attempt, samples.tolist()]
        with self.samples_log.open("a") as log:
            log.write(json.dumps(entry) + "\n")
        self.faults.reach("forward")
        time.sleep(self.plan.pace)
        loss = nn.functional.mse_loss(self(x), y)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def on_after_backward(self):
        self.faults.reach("averages")

    def forward(self, x):
        return self.head(self.backbone(x))

    def setup(self, stage):
        self.faults.reach("setup")

    def on_fit_start(self):
        self.faults.reach("fit_start")

    def on_train_start(self):
        self.faults.reach("train_start")
        self._entries, self._logged_step = self._entries + 1, self.global_step

    @property
    def progress(self):
        """For faults: in the set-up of an entry the Trainer has no count of steps yet."""
        return max(self._entries, self.global_step if self._trainer is not None else 0)

    def on_train_batch_end(self, *_):
        if self.global_step != self._logged_step:
            self._logged_step = self.global_step
            counted = [one.steps for one in self._counting]
            entry = [self._view.generation, self.global_step, self._digest(), counted]
            with self.steps_log.open("a") as log:
                log.write(json.dumps(entry) + "\n")
        self.faults.reach("batch_end")

    @property
    def _view(self):
        return self.trainer.strategy._fit.recovery.view

    def _digest(self):
        """Of all that has to be the same on all ranks."""
        state = self.trainer.optimizers[0].state
        values = [*self.parameters()]
        for param in () if isinstance(state, ShardedState) else self.parameters():
            values += state.get(param, {}).values()
        for callback in self.trainer.callbacks:
            if isinstance(callback, EMAWeightAveraging | StochasticWeightAveraging):
                values += callback._average_model.parameters()
        digest = hashlib.blake2b(digest_size=8)
        for value in values:
            digest.update(value.detach().numpy().tobytes())
        digest.update(repr([one.hooks for one in self._counting]).encode())
        return digest.hexdigest()

    @property
    def _counting(self):
        return [one for one in self.trainer.callbacks if isinstance(one, CollectiveInEveryHook)]

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.faults.reach("validation")
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def on_save_checkpoint(self, checkpoint):
        self.faults.reach("save")

    def on_train_epoch_end(self):
        self.faults.reach("epoch_end")

    def configure_optimizers(self):
        trained = [param for param in self.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class _Planted:
    """The work of a bucket, whose wait is a place of faults."""

    def __init__(self, work, faults, place):
        self._work, self._faults, self._place = work, faults, place

    def wait(self, *args):
        self._faults.reach(self._place)
        return self._work.wait(*args)

    def __getattr__(self, name):
        return getattr(self._work, name)


def live(folder, number, train):
    """The life of a forked process, which writes to ``FOLDER/NUMBER.out``."""
    out = os.open(folder / f"{number}.out", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    stacks = (folder / f"{number}.stacks").open("w")
    faulthandler.enable(stacks)  # where it crashes, it or a loader process
    faulthandler.register(signal.SIGUSR1, stacks)  # where it hangs
    (folder / f"{number}.pid").write_text(str(os.getpid()))
    code = 1
    try:
        train(number)
        code = 0
    except BaseException as error:  # as an interpreter ends
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        if code == 0:
            elastic_fit.elastic_process.__globals__["_process"].member.finish()
        os._exit(code)


def fit(folder, number, plan):
    """A fit of process ``number`` of ``plan``, with its faults."""
    faults = Faults(folder, number, plan.faults)
    if plan.nodes > 1:
        os.environ["RING_NODE_RANK"] = str(number % plan.nodes)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(plan.seed)
    module = Module(faults, folder, number, plan)
    faults.step = lambda: module.progress
    for owner, name, place in (
        (Recovery, "agree", "commit"),
        (Recovery, "committed", "step"),
        (Recovery, "after", "recovery"),
        (elastic_fit.ElasticFit, "enter", "connect"),
        (Mirrors, "receive", "mirror"),
        (Sharded, "after_commit", "gather"),
        (Sharded, "move", "move"),
        (elastic_fit, "dump_fit", "dump"),
        (MemoryCheckpoint, "send", "send"),
        (elastic_fit.ElasticFit, "_hold", "hold"),
        (ElasticStrategy, "load_checkpoint", "load"),
        (generations, "prefer_interface", "open"),
    ):
        faults.plant(owner, name, place)
    get = StewardStore.get

    def get_address(store, key):
        if "members" not in key:
            faults.reach("address")
        return get(store, key)

    StewardStore.get = get_address
    send = WholeAverages.send
    WholeAverages.send = lambda self, number, *others: [
        _Planted(work, faults, f"bucket {number}") for work in send(self, number, *others)
    ]
    go_back = TrainingPosition.go_back

    def counted(position):
        module.attempts[module.global_step] += 1
        return go_back(position)

    TrainingPosition.go_back = counted
    newest = elastic_fit.newest_of_rank_zero

    def noted(*args):
        path = newest(*args)
        with (folder / f"{number}.backs").open("a") as log:
            log.write(f"{module._view.generation}\n")
        return path

    elastic_fit.newest_of_rank_zero = noted
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(SAMPLES))
    order = ShuffledSampler(SAMPLES, remainder="drop", seed=plan.seed)
    checkpoints = folder / "disk" / "checkpoints"
    trainer = pl.Trainer(
        strategy=ElasticStrategy(
            algorithm=(Sharded if plan.sharded else Averaging)(bucket_cap_mb=0.0005),
            backend=plan.backend,
        ),
        accelerator="cpu",
        max_epochs=EPOCHS,
        accumulate_grad_batches=plan.accumulate,
        logger=CSVLogger(folder / "disk", name="csv"),
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(checkpoints, monitor="val_loss", save_top_k=2, save_last=True)]
        + [MAKERS[name](checkpoints) for name in plan.callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(
        data, batch_size=BATCH, sampler=order, drop_last=True, num_workers=plan.workers
    )
    trainer.fit(module, loader, DataLoader(data, batch_size=BATCH))
