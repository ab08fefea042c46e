"""The text of random programs: what all of them have, then what a Trainer's program or a loop by
hand has.

A line ``$place`` stands for the lines of the program's options; see `script.render`.
"""

MODULE = '''"""Seed $seed: $description

torchrun --nproc-per-node $ranks seed.py STRATEGY [save|load FILE.ckpt]      or: python seed.py one
STRATEGY is one of $strategies
"""
import copy, logging, os, random, sys, warnings
from contextlib import nullcontext

import lightning as L, lightning_ring, torch, torch.nn.functional as F, torchmetrics
from lightning.pytorch.callbacks import BackboneFinetuning, EarlyStopping, GradientAccumulationScheduler
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loggers.logger import DummyLogger as Memory
from lightning_ring import horovod as hvd
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.gradients.compression import DGC, ErrorFeedback, Int8, OneBit, PowerSGD, TernGrad, TopK
from lightning_ring.optim import LAMB, LARS
from lightning_ring.schedules import WarmupLR, gradual_warmup
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
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

    def on_fit_end(self):
        $fit_end

    $methods

    def configure_optimizers(self):
        layers = list(self.layers)
        half = (len(layers) + 1) // 2
        of = lambda layers: [p for layer in layers for p in layer.parameters()]
        parts = $parts
        $trained
        optimizers = [$optimizer for part in parts]
        return optimizers, $schedulers


def halve(parameter):
    parameter.grad.mul_(0.5)


def step_in_backward(optimizers):
    """As torch's tutorial on saving memory: a hook of each parameter steps its own optimizer, during backward."""
    for optimizer in optimizers:
        def step(parameter, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        for trained in [p for p in optimizer.param_groups[0]["params"] if p.requires_grad][:1]:
            trained.register_post_accumulate_grad_hook(step)
'''

TRAINER = '''

def checkpoints(trainer):
    """On rank 0: the names of the files that a ModelCheckpoint has written, and a sum of the weights in each."""
    facts, folder = [], trainer.checkpoint_callback.dirpath
    for file in sorted(os.listdir(folder)) if trainer.is_global_zero else []:
        weights = torch.load(os.path.join(folder, file), weights_only=False)["state_dict"].values()
        facts += [file, sum(t.abs().double().sum().item() for t in weights)]
    return facts


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
        asked = dict($ring)
        if name == "ring_sharded":
            asked["algorithm"] = Sharded(**{key: asked.pop(key, None) for key in ("bucket_cap_mb", "compression")})
        strategy = lightning_ring.RingStrategy(**asked)
    folder = f"{__file__}-{name}"  # of a ModelCheckpoint
    arguments = dict(logger=False, enable_checkpointing=False) | dict($trainer)
    model = model or Program()
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=WORLD_SIZE, max_epochs=epochs, callbacks=[$callbacks],
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        inference_mode=False, use_distributed_sampler=False, **arguments,
    )
    random.seed(SEED)
    torch.manual_seed(SEED)
    trainer.fit(model, loader(STEPS, MORE), loader(2), ckpt_path=resume)
    return fit(name, model=model, times=times - 1) if times > 1 else (model, trainer)
'''

LOOP = '''

WINDOW = $window  # backwards of a step
BATCHES = [$batches][:RANKS]  # of each rank in an epoch


def part(step, rank):
    return torch.randn(2, ROWS, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * step + rank))


class Share(nn.Module):
    """The loss of this rank's rows; in one process the mean over all ranks, of which those without rows add zeros."""
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, step, i):
        ranks = [RANK] if WORLD_SIZE > 1 else [rank for rank in range(RANKS) if i < BATCHES[rank]]
        losses = [self.model.loss(part(step, rank), rank, step) for rank in ranks]
        return sum(losses) / (RANKS if WORLD_SIZE == 1 and "$reduction" == "mean" else 1)


class Loop:
    """A training loop by hand, with the attributes of a Trainer that the module reads."""
    callback_metrics, is_global_zero, world_size, global_rank = {}, RANK == 0, WORLD_SIZE, RANK

    def __init__(self, name, model):
        self.name, self.model, self.training, self.current_epoch = name, model, None, 0
        model.trainer = self
        self.optimizers = $optimizers
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=$scaler)
        self.share, self.no_sync, self.clip_norm_ = Share(model), nullcontext, nn.utils.clip_grad_norm_
        $before
        if name == "ddp":
            if not torch.distributed.is_initialized():
                torch.distributed.init_process_group("gloo")
            self.share = nn.parallel.DistributedDataParallel(self.share, find_unused_parameters=$unused)
            self.no_sync = self.share.no_sync
        elif name == "horovod":
            hvd.init()
            self.start_from(0)
            named = list(model.named_parameters())
            self.optimizers = [
                hvd.DistributedOptimizer(o, named, backward_passes_per_step=WINDOW, **dict($horovod))
                for o in self.optimizers
            ]
        elif name != "one":
            self.training = lightning_ring.distribute(model, self.optimizers, algorithm=name, **dict($ring))
            self.no_sync, self.clip_norm_ = self.training.no_sync, self.training.clip_grad_norm_
        $after

    def step(self, i):
        last = (i + 1) % WINDOW == 0
        try:
            with nullcontext() if last or $synced else self.no_sync():
                loss = self.share(self.model.step_of(i), i) / WINDOW
                self.scaler.scale(loss).backward()
        except ArithmeticError:  # of `Raises`, on all ranks
            return self.zero_grad()
        self.model.on_after_backward()
        if last or $clips:
            $clip_by_hand
        if last:
            for optimizer in self.optimizers:
                self.model.on_before_optimizer_step(optimizer)
                with optimizer.skip_synchronize() if self.name == "horovod" and $clipped else nullcontext():
                    self.scaler.step(optimizer)
            self.scaler.update()
            self.zero_grad()

    def clip(self, clip, limit):
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
            if self.name == "horovod":
                optimizer.synchronize()
        clip([p for o in self.optimizers for group in o.param_groups for p in group["params"]], limit)

    def wait(self):
        """Before a hook of the program reads parameters between two steps."""
        if self.training:
            self.training.wait_parameters()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def start_from(self, rank):
        hvd.broadcast_parameters(self.model.state_dict(), rank)
        for optimizer in self.optimizers:
            hvd.broadcast_optimizer_state(optimizer, rank)

    def join(self):
        if self.name == "horovod":
            self.start_from(hvd.join())

    def save_checkpoint(self, path):
        distributed = self.training
        states = [distributed.optimizer_state_dict(o) if distributed else o.state_dict() for o in self.optimizers]
        ours = distributed.state_dict() if distributed else {}
        if RANK == 0:
            state = {"optimizer_states": states, "epoch": self.current_epoch, "scaler": self.scaler.state_dict()}
            torch.save({"state_dict": self.model.state_dict(), "algorithm": ours} | state, path)

    def load_checkpoint(self, path):
        state = torch.load(path, weights_only=False)
        self.model.load_state_dict(state["state_dict"])
        for optimizer, own in zip(self.optimizers, state["optimizer_states"]):
            if self.training:
                self.training.load_optimizer_state_dict(optimizer, own)
            else:
                optimizer.load_state_dict(own)
        if self.training and state["algorithm"]:
            self.training.load_state_dict(state["algorithm"])
        self.current_epoch = state["epoch"]
        self.scaler.load_state_dict(state["scaler"])

    def close(self):
        if self.training:
            self.training.close()
        if self.name == "horovod":
            hvd.shutdown()


def fit(name, epochs=EPOCHS, resume=None):
    model = Program()
    loop = Loop(name, model)
    if resume:
        loop.load_checkpoint(resume)
    torch.manual_seed(SEED)
    model.on_train_start()
    while loop.current_epoch < epochs:
        model.on_train_epoch_start()
        for i in range(BATCHES[RANK] if WORLD_SIZE > 1 else max(BATCHES)):
            batch = part(model.step_of(i), RANK)
            model.on_train_batch_start(batch, i)
            loop.step(i)
            model.on_train_batch_end(None, batch, i)
        loop.join()
        loop.current_epoch += 1
    return model, loop
'''

MAIN = """

if __name__ == "__main__":
    strategy, how, path = (*sys.argv[1:], None, None)[:3]
    model, trainer = fit(strategy, epochs=1 if how == "save" else EPOCHS, resume=path if how == "load" else None)
    if how == "save":
        trainer.save_checkpoint(path)
    total = sum(p.detach().abs().double().sum().item() for p in model.parameters())
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    print(f"{strategy} rank {RANK}: sum|w| = {total!r} {metrics} {[*model.seen, *model.gradients][-4:]}", flush=True)
"""
