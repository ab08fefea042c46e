"""One rank of one job of `benchmarks.step`: trains through `L.Trainer`, in turns.

``python -m benchmarks.step.rank MODEL CONTENDER``. Contenders are written like ``ddp``, ``ring`` or
``ring:backend=gloo,bucket_cap_mb=4``: a strategy, and arguments of `RingStrategy`. Of those the
others know ``keep_freed_memory=True``, which gives them what is ring's default.

``--fork JOBS HOST`` forks all ranks that several jobs have on one host from one process that has
imported Lightning once, which takes longer than what is measured; nothing of torch's threads, MPI
or CUDA has started by then. A rank finds its place in torchrun's variables, which Lightning's DDP
and lightning_ring both read.
"""

import ast
import atexit
import gc
import itertools
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import warnings
from contextlib import nullcontext

import lightning as L
import torch
import torch.nn.functional as F
import torchvision
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.turns import Turns, parser_of
from benchmarks.wires.rank import network
from lightning_ring import ElasticStrategy, RingStrategy
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.data import ShuffledSampler
from lightning_ring.host.malloc import keep_freed_memory


class ManySmall(nn.Module):
    """500 parameters of 1,000 elements, each used once: little computation, many gradients."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(1000)) for _ in range(500))

    def forward(self, x):
        for scale in self.scales:
            x = x * scale
        return x


NUM_BATCHES = 1_000_000  # the same again and again: no time goes into loading
# Name: model, shape of a sample, default batch of a rank.
MODELS = {
    "resnet18": (lambda: torchvision.models.resnet18(), (3, 64, 64), 16),
    "resnet50": (lambda: torchvision.models.resnet50(), (3, 224, 224), 256),
    "many_small": (ManySmall, (1000,), 1),
    "small": (lambda: network(384), (1, 8, 16), 64),
    "tiny": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 10)), (3, 8, 8), 4),
}


class Trained(L.LightningModule):
    """``model`` on one random batch, again and again, with SGD and momentum.

    Each step waits in ``begin_step``: in a callback between steps, which may read parameters,
    `ring_sharded` would wait for all of them.
    """

    def __init__(self, model, channels_last, begin_step=lambda: True):
        super().__init__()
        self.model = model.to(memory_format=torch.channels_last) if channels_last else model
        self._begin_step = begin_step

    def training_step(self, batch, batch_idx):
        if not self._begin_step():
            self.trainer.should_stop = True
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6, momentum=0.9)


class SameBatch:
    """Has a length: without one, ranks ask each other before each batch."""

    def __init__(self, batch):
        self._batch = batch

    def __len__(self):
        return NUM_BATCHES

    def __iter__(self):
        return itertools.repeat(self._batch, NUM_BATCHES)


def one_batch(shape, batch_size, device="cpu", channels_last=False):
    images = torch.randn(batch_size, *shape, device=device)
    if channels_last:
        images = images.to(memory_format=torch.channels_last)
    return images, torch.zeros(batch_size, dtype=torch.int64, device=device)


class LeavesTurns(L.Callback):
    def __init__(self, turns):
        self._turns = turns

    def on_train_end(self, trainer, *_):
        algorithm = getattr(trainer.strategy, "algorithm", None)
        # sharded state is hidden otherwise
        shown = getattr(algorithm, "states_shown", nullcontext)
        with shown():
            held = optimizer_state_bytes()
        self._turns.leave({"strategy": type(trainer.strategy).__name__, "state_bytes": held})


def optimizer_state_bytes():
    """Bytes of all tensors in the state of all optimizers of this process, each memory once."""
    seen = {}
    optimizers = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
    for state in (state for optimizer in optimizers for state in optimizer.state.values()):
        for value in state.values():
            if isinstance(value, Tensor) and value.dim():
                seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(seen.values())


def strategy(contender, device):
    """The strategy, and what the Trainer has to be told besides."""
    name, _, text = contender.partition(":")
    settings = dict(setting.split("=", 1) for setting in text.split(",")) if text else {}
    by_ringrun = os.environ.get("RING_WORLD_SIZE", "1")  # on one host
    world_size = int(os.environ.get("WORLD_SIZE", by_ringrun))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", by_ringrun))
    if name in ("auto", "alone", "ddp") and settings.get("keep_freed_memory") == "True":
        keep_freed_memory()
    devices = {"devices": local_size, "num_nodes": world_size // local_size}
    if name in ("auto", "alone"):  # alone: every rank by itself, without communication
        # Else Lightning looks for an environment, and raises where mpi4py has no MPI library.
        own = {"devices": 1, "plugins": [LightningEnvironment()]}
        return "auto" if name == "auto" else SingleDeviceStrategy(torch.device(device)), own
    if name == "ddp":
        alone = world_size == 1
        environment = LightningEnvironment() if alone else TorchElasticEnvironment()
        backend = "nccl" if device.startswith("cuda") else "gloo"
        return DDPStrategy(cluster_environment=environment, process_group_backend=backend), devices
    values = {key: _value(value) for key, value in settings.items()}
    if name == "ring_elastic":
        return ElasticStrategy(**values), devices
    if name == "ring_sharded":
        wire = {key: values.pop(key, None) for key in ("bucket_cap_mb", "compression")}
        values["algorithm"] = Sharded(**wire)
    elif name != "ring":
        known = "auto, alone, ddp, ring, ring_sharded and ring_elastic"
        raise SystemExit(f"{contender}: contenders are {known}")
    return RingStrategy(**values), devices


def _value(text):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def main(arguments=None):
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("model", choices=MODELS)
    add("contender")
    add("--batch", type=int)
    add("--image", type=int, help="pixels a side, of a model of images")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--precision", default="32-true")
    add("--channels-last", action="store_true")
    add("--logger", action="store_true", help="log to TensorBoard, in a temporary folder")
    add("--sampled", action="store_true", help="read through a sampler, as elastic fits need")
    asked = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    L.seed_everything(0, verbose=False)
    build, shape, batch_size = MODELS[asked.model]
    if asked.image:
        shape = (3, asked.image, asked.image)
    on_cuda = asked.device == "cuda"
    on_gpu = (torch.cuda.synchronize, torch.cuda.empty_cache) if on_cuda else ()
    turns = Turns(asked.contender, *on_gpu)
    chosen, settings = strategy(asked.contender, "cuda:0" if on_cuda else "cpu")
    quiet = ("enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    trainer = L.Trainer(
        strategy=chosen,
        accelerator="gpu" if on_cuda else "cpu",
        precision=asked.precision,
        callbacks=[LeavesTurns(turns)],
        benchmark=on_cuda,
        max_epochs=1,
        logger=TensorBoardLogger(tempfile.mkdtemp(prefix="ring-step-")) if asked.logger else False,
        **dict.fromkeys(quiet, False),
        **settings,
    )
    for logger in trainer.loggers:
        atexit.register(shutil.rmtree, logger.save_dir, ignore_errors=True)
    batch_size = asked.batch or batch_size
    batch = one_batch(shape, batch_size, asked.device, asked.channels_last)
    batches = SameBatch(batch)
    if asked.sampled:
        length = NUM_BATCHES * batch_size
        order = ShuffledSampler(length, shuffle=False, remainder="drop", seed=0)
        batches = DataLoader(range(length), batch_size, sampler=order, collate_fn=lambda _: batch)
    trainer.fit(Trained(build(), asked.channels_last, turns.wait), batches)


def fork(job, host):
    """Run this host's ranks of all jobs; 1 if one failed, which ends the others."""
    pids = set()
    for name in job["jobs"]:
        for rank in range(host, job["ranks"], job["hosts"]):
            pid = os.fork()
            if pid == 0:
                if job["ranks"] > 1:
                    os.environ.update(place(job, name, rank))
                main([*job["arguments"], name])
                sys.exit(0)
            pids.add(pid)
    code = 0
    while pids:
        pid, status = os.wait()
        pids.discard(pid)
        if status and not code:
            code = 1
            for other in pids:
                os.kill(other, signal.SIGTERM)
    return code


def place(job, name, rank):
    """torchrun's variables of one rank; ranks are round-robin over the hosts."""
    node, local_rank = rank % job["hosts"], rank // job["hosts"]
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": job["ranks"],
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": len(range(node, job["ranks"], job["hosts"])),
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": job["hosts"],
        "MASTER_PORT": job["jobs"][name],
    }
    found = {variable: str(number) for variable, number in numbers.items()}
    return found | {"TORCHELASTIC_RUN_ID": name, "MASTER_ADDR": job["master"]}


if __name__ == "__main__":
    if sys.argv[1] == "--fork":
        sys.exit(fork(json.loads(sys.argv[2]), int(sys.argv[3])))
    main()
