"""A random Lightning program: drawn from a seed, and written out as a script that runs by itself."""

from __future__ import annotations

import dataclasses
import inspect
import random
import re
import textwrap
from dataclasses import dataclass, field

from tests.fuzz import blocks
from tests.fuzz.module_features import BLOCKS, HOOKS, MODULE
from tests.fuzz.option import Option
from tests.fuzz.rules import settle
from tests.fuzz.trainer_features import TRAINER

AXES = MODULE | TRAINER
STRATEGIES = ("one", "ddp", "ring", "ring_sharded")


@dataclass
class Program:
    """What was drawn for ``seed``. ``choices``: axis -> option; an axis that is not in it has its first option."""

    seed: int
    ranks: int = 2
    blocks: list[str] = field(default_factory=lambda: ["Linear()"])
    hooks: list[str] = field(default_factory=list)
    choices: dict[str, str] = field(default_factory=dict)

    def choice(self, axis: str) -> str:
        return self.choices.get(axis, next(iter(AXES[axis])))

    def options(self) -> list[Option]:
        chosen = [AXES[axis][self.choice(axis)] for axis in AXES]
        return [BLOCKS[block] for block in self.blocks] + chosen + [HOOKS[hook] for hook in self.hooks]

    @property
    def strategies(self) -> list[str]:
        """Those that the program has one meaning under."""
        without = {name for option in self.options() for name in option.without}
        return [name for name in STRATEGIES if name not in without]

    @property
    def source_of(self) -> dict[str, str]:
        """Strategy -> the strategy whose checkpoint it resumes; empty where the program resumes nothing."""
        names, how = self.strategies, self.choice("again")
        if not how.startswith("resumed"):
            return {}
        parallel = [name for name in names if name != "one"]
        if how == "resumed on another number of ranks":
            return dict.fromkeys(parallel, "one") | {"one": parallel[-1]}
        after = dict(zip(parallel, parallel[-1:] + parallel[:-1], strict=True))
        return after | ({"one": parallel[0]} if "one" in names else {})

    def description(self) -> str:
        changed = [f"{axis}: {option}" for axis, option in self.choices.items() if option != next(iter(AXES[axis]))]
        parts = [f"{self.ranks} ranks", " > ".join(self.blocks), *changed]
        return "; ".join(parts + [f"hook: {hook}" for hook in self.hooks])

    def simpler(self) -> list[Program]:
        """Programs with one thing less."""
        found = []
        for axis, option in self.choices.items():
            if option != next(iter(AXES[axis])):
                rest = {name: value for name, value in self.choices.items() if name != axis}
                found.append(dataclasses.replace(self, choices=rest))
        for index in range(len(self.hooks)):
            found.append(dataclasses.replace(self, hooks=self.hooks[:index] + self.hooks[index + 1 :]))
        for index, block in enumerate(self.blocks):
            rest_of_blocks = self.blocks[:index] + self.blocks[index + 1 :]
            if rest_of_blocks:
                found.append(dataclasses.replace(self, blocks=rest_of_blocks))
            if block != "Linear()":
                plain = [*self.blocks[:index], "Linear()", *self.blocks[index + 1 :]]
                found.append(dataclasses.replace(self, blocks=plain))
        if self.ranks > 2:
            found.append(dataclasses.replace(self, ranks=2))
        known = self.description()
        return [program for program in map(settled, found) if program.description() != known]

    def script(self) -> str:
        return _script(self)


def draw(seed: int) -> Program:
    """The same program for the same seed, on every machine."""
    chance = random.Random(seed)

    def pick(options: dict[str, Option]) -> str:
        return chance.choices(list(options), [option.weight for option in options.values()])[0]

    program = Program(seed, ranks=chance.choices([2, 3], [6, 1])[0])
    program.blocks = [pick(BLOCKS) for _ in range(chance.randint(2, 4))]
    program.hooks = chance.sample(list(HOOKS), chance.choices([0, 1, 2], [3, 3, 1])[0])
    # half of the other axes stay plain, so that a program can be read and a finding has few causes
    program.choices = {axis: pick(options) for axis, options in AXES.items() if chance.random() < 0.5}
    return settled(program)


def settled(program: Program) -> Program:
    program = dataclasses.replace(
        program, blocks=list(program.blocks), hooks=list(program.hooks), choices=dict(program.choices)
    )
    settle(program)
    return program


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


def _script(program: Program) -> str:
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
    used = {name for text in names for name in re.findall(r"[A-Z]\w+(?=\()", text)}
    classes = {name: value for name, value in vars(blocks).items() if inspect.isclass(value)}
    ours = {name: value for name, value in classes.items() if value.__module__ == blocks.__name__}
    needed = {parent.__name__ for name in used for parent in ours[name].__mro__}
    return "\n\n".join(inspect.getsource(value) for name, value in ours.items() if name in needed)
