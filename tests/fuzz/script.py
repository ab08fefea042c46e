"""A random program as a script: lines of its options in the places of one template."""

from __future__ import annotations

import ast
import re
import textwrap
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.program import Program

TEMPLATE = '''"""Seed $seed: $description

torchrun --nproc-per-node $ranks seed.py ddp|ring|ring_sharded [save|load FILE.ckpt]      or: python seed.py one
"""
import copy, logging, os, random, sys, warnings
from contextlib import nullcontext

import lightning as L, lightning_ring, torch, torch.nn.functional as F, torchmetrics
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loggers.logger import DummyLogger as Memory
from lightning_ring.optim import LAMB, LARS
from lightning_ring.schedules import WarmupLR, gradual_warmup
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SEED, RANKS, EPOCHS, STEPS, ROWS, DTYPE, MORE = $seed, $ranks, 2, 4, 4, $dtype, $more
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

$classes

class Program(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(SEED)
        self.seen, self.gradients = [], []
        self.layers = nn.ModuleList([$layers])
        if DTYPE == torch.float64:
            self.double()  # complex parameters stay what they are
        $init

    def weight(self):
        return next(p for p in self.parameters() if p.requires_grad and p.numel() > 1)

    def forward(self, x, rank, step):
        h = x
        for layer in self.layers:
            h = layer(h, x, rank, step)
        return h

    def loss(self, part, rank, step):
        x, y = (t.to(DTYPE) for t in part)
        $skip
        $input
        h = self(x, rank, step)
        loss = F.mse_loss(h.to(DTYPE), y)
        $loss
        return loss

    def evaluate(self, batch):
        x, y = (t.to(DTYPE) for t in batch)
        return F.mse_loss(self(x, 0, 0).to(DTYPE), y)

    def share(self, batch, step):
        """This rank's loss; in one process the mean of the losses that RANKS ranks would have."""
        if WORLD_SIZE > 1:
            return self.loss(batch, self.global_rank, step)
        if MORE and len(batch[0]) == ROWS:  # the other ranks have no more data
            return self.loss(batch, 0, step)
        losses = [self.loss([t[rank::RANKS] for t in batch], rank, step) for rank in range(RANKS)]
        losses = [loss for loss in losses if loss is not None]
        return sum(losses) / RANKS if losses else None

    def step_of(self, batch_idx):
        return self.current_epoch * STEPS + batch_idx

    def training_step(self, batch, batch_idx):
        $step

    def validation_step(self, batch, batch_idx):
        $validation

    def on_train_start(self):
        $train_start

    def on_train_epoch_start(self):
        $epoch_start

    def on_train_batch_start(self, batch, batch_idx):
        $batch_start

    def on_after_backward(self):
        $after_backward

    def on_before_optimizer_step(self, optimizer):
        $before_step

    def on_train_batch_end(self, outputs, batch, batch_idx):
        $batch_end

    $methods

    def configure_optimizers(self):
        layers = list(self.layers)
        half = (len(layers) + 1) // 2
        parts = [[p for layer in part for p in layer.parameters()] for part in $parts]
        $trained
        optimizers = [$optimizer for part in parts]
        return optimizers, $schedulers


def halve(parameter):
    parameter.grad.mul_(0.5)


class Thaw(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.layers[0], train_bn=False)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layers[0], optimizer, lr=0.01)


def loader(batches, more=False):
    torch.manual_seed(SEED + 1)
    rows = ROWS * RANKS * batches + (ROWS if more else 0)
    data = torch.utils.data.TensorDataset(*torch.randn(2, rows, 6, dtype=torch.float64))
    if WORLD_SIZE == 1:
        return torch.utils.data.DataLoader(data, batch_size=ROWS * RANKS)
    if more:  # the last rows are rank 0's
        mine = [i for i in range(rows - ROWS) if i % RANKS == RANK] + list(range(rows - ROWS, rows)) * (RANK == 0)
        return torch.utils.data.DataLoader(torch.utils.data.Subset(data, mine), batch_size=ROWS)
    sampler = torch.utils.data.DistributedSampler(data, RANKS, RANK, shuffle=False)
    return torch.utils.data.DataLoader(data, batch_size=ROWS, sampler=sampler)


def fit(name, epochs=EPOCHS, resume=None, model=None, times=$times):
    strategy = {"one": "auto", "ddp": "$ddp"}.get(name)
    if strategy is None:
        strategy = lightning_ring.RingStrategy(shard_optimizer=name == "ring_sharded", **dict($ring))
    arguments = dict(logger=False) | dict($trainer)
    model = model or Program()
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=WORLD_SIZE, max_epochs=epochs, callbacks=[$callbacks],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        inference_mode=False, use_distributed_sampler=False, **arguments,
    )
    random.seed(SEED)
    torch.manual_seed(SEED)
    trainer.fit(model, loader(STEPS, MORE), loader(2), ckpt_path=resume)
    return fit(name, model=model, times=times - 1) if times > 1 else (model, trainer)


if __name__ == "__main__":
    strategy, how, path = (*sys.argv[1:], None, None)[:3]
    model, trainer = fit(strategy, epochs=1 if how == "save" else EPOCHS, resume=path if how == "load" else None)
    if how == "save":
        trainer.save_checkpoint(path)
    total = sum(p.detach().abs().double().sum().item() for p in model.parameters())
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    print(f"{strategy} rank {RANK}: sum|w| = {total!r} {metrics} {[*model.seen, *model.gradients][-4:]}", flush=True)
'''


def render(program: Program) -> str:
    """The script of ``program``."""
    places: dict[str, list[str]] = {}
    for option in program.options():
        for place, code in option.code.items():
            places.setdefault(place, []).append(code)
    if program.choice("training") != "automatic":  # the module clips, the Trainer must not
        places["trainer"] = [code for code in places.get("trainer", []) if "clip" not in code]
    optimizer = places.pop("optimizer")[0].format(places.pop("groups")[0].format("part"))
    parts = "(layers[:half], layers[half:])" if "parts" in places else "(layers,)"
    thawed_later = program.choice("freeze") == "finetuning callback"
    trained = "parts = [[p for p in part if p.requires_grad] for part in parts]" if thawed_later else "pass"
    scheduler = places.get("scheduler", [""])[0].format("o")
    steps = (
        "for scheduler in [self.lr_schedulers()]:\n    scheduler.step()" if scheduler and "parts" not in places else ""
    )
    if scheduler and "parts" in places:
        steps = "for scheduler in self.lr_schedulers():\n    scheduler.step()"
    values = {
        "seed": str(program.seed),
        "ranks": str(program.ranks),
        "description": program.description(),
        "classes": _classes(program.blocks + (["Linear()"] if "new layer" in program.choice("freeze") else [])),
        "layers": ", ".join(program.blocks),
        "optimizer": optimizer,
        "parts": parts,
        "trained": trained,
        "schedulers": f"[{scheduler} for o in optimizers]" if scheduler else "[]",
        "dtype": places.pop("dtype", ["torch.float64"])[0],
        "more": places.pop("more", ["False"])[0],
        "ddp": "ddp_find_unused_parameters_true" if any(o.unused for o in program.options()) else "ddp",
        "times": "2" if program.choice("again") == "fit twice" else "1",
        "clip": places.pop("clip", ["pass"])[0],
        "log": places.pop("log", ["pass"])[0],
        "steps": steps or "pass",
    }
    for place in ("ring", "trainer", "callbacks"):
        values[place] = ", ".join(places.pop(place, []))
    for place in re.findall(r"\$(\w+)", TEMPLATE):
        values.setdefault(place, "\n".join(places.get(place, [])) or ("" if place == "methods" else "pass"))
    text = TEMPLATE
    while match := re.search(r"^( *)(.*)\$(\w+)", text, re.MULTILINE):  # a place may name another place
        indent, before, place = match.groups()
        code = textwrap.indent(values[place], indent).removeprefix(indent) if not before.strip() else values[place]
        text = text[: match.start()] + indent + before + code + text[match.end() :]
    text = re.sub(r"    def \w+\(.*\):\n +pass\n\n", "", text)  # an empty hook would count as overridden
    return re.sub(r"(?<!:)\n +pass(?=\n)", "", text)


def _classes(names: list[str]) -> str:
    """Source of the blocks that ``names`` call, and of those that they derive from, in the order of the file."""
    sources, parents = _blocks()
    needed = {name for text in names for name in re.findall(r"[A-Z]\w+(?=\()", text)}
    needed |= {parents[name] for name in needed}
    return "\n\n\n".join(source for name, source in sources.items() if name in needed)


@cache
def _blocks() -> tuple[dict[str, str], dict[str, str]]:
    """Source and first parent of each class of ``blocks.py``, from its text: importing it would import torch."""
    text = Path(__file__).with_name("blocks.py").read_text()
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    sources = {node.name: ast.get_source_segment(text, node) or "" for node in classes}
    return sources, {node.name: ast.unparse(node.bases[0]) for node in classes}
