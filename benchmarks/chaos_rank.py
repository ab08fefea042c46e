"""A rank of `chaos.py`: a fit with faults planted in it."""

from __future__ import annotations

import faulthandler
import functools
import hashlib
import json
import os
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ring import RingStrategy
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.algorithms.sharded.mirrors import Mirrors
from lightning_ring.algorithms.sharded.state import ShardedState
from lightning_ring.data import ShuffledSampler
from lightning_ring.elastic.recovery import Recovery
from lightning_ring.integrations.lightning.elastic import fit as elastic_fit
from lightning_ring.integrations.lightning.elastic.position import TrainingPosition

SAMPLES, BATCH, EPOCHS, STEPS = 96, 4, 2, 10
GRADIENTS = 6
PLACES = (
    *("forward", *(f"gradient {number}" for number in range(GRADIENTS)), "averages", "commit", "step", "batch_end"),
    *("validation", "save", "epoch_end", "recovery", "connect", "hand_over"),
)
SHARDED_PLACES = ("mirror", "gather", "move")  # in addition, with sharded optimizers


@dataclass(frozen=True, slots=True)
class Fault:
    """In process ``number``, once ``step`` steps are finished, when it comes to ``place``; ``kind`` as in `KINDS`."""

    number: int
    step: int
    place: str
    kind: str


class Faults:
    """Carries out those of this process."""

    def __init__(self, folder: Path, number: int, faults: tuple[Fault, ...]) -> None:
        self._log = folder / f"{number}.fault"
        self._own = [fault for fault in faults if fault.number == number]
        self.step: Callable[[], int] = lambda: 0

    def reach(self, place: str) -> None:
        for fault in self._own:
            if fault.place == place and self.step() >= fault.step:
                self._log.write_text(f"{fault.number} {fault.step} {fault.place.split()[0]} {fault.kind}\n")
                if fault.kind == "exit":
                    os._exit(9)
                os.kill(os.getpid(), signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL)

    def plant(self, owner: Any, name: str, place: str) -> None:
        """Reach ``place`` before each call of the function ``name`` of ``owner``."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def reaching(*args: Any, **kwargs: Any) -> Any:
            self.reach(place)
            return function(*args, **kwargs)

        setattr(owner, name, reaching)


class Module(pl.LightningModule):
    def __init__(self, faults: Faults, folder: Path, number: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
        self.faults = faults
        self.attempts: Counter[int] = Counter()
        self.samples_log, self.steps_log = folder / f"{number}.samples", folder / f"{number}.steps"
        for index, param in enumerate(self.parameters()):
            param.register_post_accumulate_grad_hook(lambda _, index=index: faults.reach(f"gradient {index}"))

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y, samples = batch
        entry = [self.current_epoch, self.global_step, self.attempts[self.global_step], samples.tolist()]
        with self.samples_log.open("a") as log:
            log.write(json.dumps(entry) + "\n")
        self.faults.reach("forward")
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def on_after_backward(self) -> None:
        self.faults.reach("averages")

    def on_train_batch_end(self, *_: Any) -> None:
        digest = hashlib.blake2b(digest_size=8)
        state = self.trainer.optimizers[0].state
        for param in self.parameters():
            digest.update(param.detach().numpy().tobytes())
            for value in () if isinstance(state, ShardedState) else state[param].values():
                digest.update(value.numpy().tobytes())
        with self.steps_log.open("a") as log:
            log.write(json.dumps([self.global_step, digest.hexdigest()]) + "\n" if self.global_step else "")
        self.faults.reach("batch_end")

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.faults.reach("validation")
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.faults.reach("save")

    def on_train_epoch_end(self) -> None:
        self.faults.reach("epoch_end")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def live(folder: Path, number: int, train: Callable[[int], None]) -> NoReturn:
    """The life of a forked process, which writes to ``FOLDER/NUMBER.out``."""
    out = os.open(folder / f"{number}.out", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.register(signal.SIGUSR2)  # where it hangs
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


def fit(folder: Path, number: int, plan: Any) -> None:
    """A fit of process ``number`` with the faults of a `chaos.Plan`."""
    seed, planted = plan.seed, plan.faults
    faults = Faults(folder, number, planted)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    module = Module(faults, folder, number)
    faults.step = lambda: module.global_step if module._trainer is not None else 0
    faults.plant(Recovery, "agree", "commit")
    faults.plant(Recovery, "committed", "step")
    faults.plant(Recovery, "after", "recovery")
    faults.plant(elastic_fit.ElasticFit, "enter", "connect")
    faults.plant(elastic_fit, "hand_over_fit", "hand_over")
    faults.plant(Mirrors, "receive", "mirror")
    faults.plant(Sharded, "after_commit", "gather")
    faults.plant(Sharded, "move", "move")
    go_back = TrainingPosition.go_back

    def counted(position: TrainingPosition) -> Any:
        module.attempts[module.global_step] += 1
        return go_back(position)

    TrainingPosition.go_back = counted  # type: ignore[method-assign]
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(SAMPLES))
    order = ShuffledSampler(SAMPLES, remainder="drop", seed=seed)
    trainer = pl.Trainer(
        strategy=RingStrategy(elastic=True, backend=plan.backend, bucket_cap_mb=0.0005, shard_optimizer=plan.sharded),
        accelerator="cpu",
        max_epochs=EPOCHS,
        accumulate_grad_batches=plan.accumulate,
        logger=CSVLogger(folder, name="csv"),
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(folder / "checkpoints", monitor="val_loss", save_top_k=2, save_last=True)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(data, batch_size=BATCH, sampler=order, drop_last=True)
    trainer.fit(module, loader, DataLoader(data, batch_size=BATCH))
