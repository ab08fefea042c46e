"""Every way of the Trainer on one GPU over real NCCL: ``python -m benchmarks.gpu --stages ways``.

One rank trains a small network with ``force_communication=True``, so that all buckets and
collectives run, and again on a plain single device with the same seed. A line for each way says
whether the parameters agree: ``ok``, ``bits`` (the same bits), ``largest`` (relative norm of the
difference), ``allowed``, ``moved`` (by training). On a CPU the same ways run over Gloo, without a
loss scaler.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.gpu.checks import report, within
from lightning_ring import RingStrategy
from lightning_ring.algorithms.local import LocalSGD
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.gradients.compression import DGC, PowerSGD
from lightning_ring.optim import LAMB, LARS

SAME, CLOSE, ROUNDED, APPROXIMATE = 0.0, 1e-5, 1e-2, 0.3
MOVED, STEPS = 1e-4, 3
# Formats that send less than the gradient, and the error of it later: they train, on a way of
# their own.
ONWARD = ("onebit", "terngrad", "topk", DGC(momentum=0.0))


@dataclass(frozen=True)
class Way:
    """How one run differs from the plain one, and how far its parameters may be from it."""

    name: str
    tolerance: float
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)
    resumes: bool = False


class Net(L.LightningModule):
    """Convolution, BatchNorm and linear layers."""

    def __init__(self, optimizer: str = "sgd", channels_last: bool = False, compiler: str = ""):
        super().__init__()
        self.optimizer = optimizer
        convolution = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
        self.body = nn.Sequential(*convolution, nn.Linear(288, 40), nn.Tanh(), nn.Linear(40, 4))
        if channels_last:
            self.body.to(memory_format=torch.channels_last)
        if compiler:
            self.body.compile(backend=compiler)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.body(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        kind = {"lars": LARS, "lamb": LAMB}[self.optimizer]
        return kind(self.parameters(), lr=0.02)


def ways(device: str) -> list[Way]:
    scaled = {"precision": "16-mixed" if device == "cuda" else "bf16-mixed"}
    compiler = {"compiler": "inductor" if device == "cuda" else "aot_eager"}
    bf16, accumulated = {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}
    rounded = dict.fromkeys(("fp16", "bf16", "int8"), ROUNDED)
    onward = dict.fromkeys((*ONWARD, PowerSGD(rank=4, start_iter=1)), APPROXIMATE)
    return [
        Way("ring", SAME),
        Way("ring, monitor off", SAME, {"monitor": False}),
        Way("ring, timeline", SAME, {"timeline": Path(tempfile.mkdtemp()) / "trace.json"}),
        *(
            Way(f"ring, {_name(wire)}", near, {"compression": wire})
            for wire, near in (rounded | onward).items()
        ),
        Way("ring, bf16-true, fp32", SAME, {"compression": "fp32"}, {"precision": "bf16-true"}),
        Way("ring, bf16-mixed", SAME, {}, bf16),
        Way("ring, 16-mixed", SAME, {}, scaled),
        Way("ring, 16-mixed, clipped", CLOSE, {}, scaled | {"gradient_clip_val": 0.1}),
        Way("ring, clipped", CLOSE, {}, {"gradient_clip_val": 0.1}),
        Way("ring, accumulated", SAME, {}, accumulated),
        Way("ring, channels_last", SAME, {}, {}, {"channels_last": True}),
        Way("ring, LARS", SAME, {}, {}, {"optimizer": "lars"}),
        Way("ring, LAMB", SAME, {}, {}, {"optimizer": "lamb"}),
        Way("ring, resumed", SAME, resumes=True),
        Way("ring_sharded", CLOSE, {"algorithm": Sharded()}),
        Way("ring_sharded, bf16", ROUNDED, {"algorithm": Sharded(compression="bf16")}),
        Way("ring_sharded, int8", ROUNDED, {"algorithm": Sharded(compression="int8")}),
        Way("ring_sharded, bf16-mixed", CLOSE, {"algorithm": Sharded()}, bf16),
        Way("ring_sharded, 16-mixed", CLOSE, {"algorithm": Sharded()}, scaled),
        Way("ring_sharded, clipped", CLOSE, {"algorithm": Sharded()}, {"gradient_clip_val": 0.1}),
        Way("ring_sharded, accumulated", CLOSE, {"algorithm": Sharded()}, accumulated),
        Way("ring_sharded, LARS", CLOSE, {"algorithm": Sharded()}, {}, {"optimizer": "lars"}),
        Way("ring_sharded, LAMB", CLOSE, {"algorithm": Sharded()}, {}, {"optimizer": "lamb"}),
        Way("ring_sharded, resumed", CLOSE, {"algorithm": Sharded()}, resumes=True),
        Way("ring_local", CLOSE, {"algorithm": LocalSGD()}),
        # The slowest come last.
        Way("ring, compiled", CLOSE, {}, {}, compiler),
        Way("ring_sharded, compiled", CLOSE, {"algorithm": Sharded()}, {}, compiler),
    ]  # fmt: skip


def _name(wire: Any) -> str:
    return wire if isinstance(wire, str) else type(wire).__name__


def train(way: Way, strategy: Any, device: str) -> Tensor:
    """The parameters after two epochs, the second in another Trainer if the way resumes."""
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(8 * STEPS, 3, 8, 8, generator=generator)
    labels = torch.randint(0, 4, (len(images),), generator=generator)
    unwanted = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    settings = dict.fromkeys(("use_distributed_sampler", *unwanted), False) | {
        "accelerator": "gpu" if device == "cuda" else "cpu",
        "devices": 1,
        "log_every_n_steps": 2,
        # Else Lightning looks for one, and raises where mpi4py has no MPI library.
        "plugins": [LightningEnvironment()] if strategy is None else None,
        **way.trainer,
    }
    with tempfile.TemporaryDirectory() as folder:
        saved: Path | None = None
        for last_epoch in (1, 2) if strategy is not None and way.resumes else (2,):
            L.seed_everything(3, verbose=False)
            module = Net(**way.module)
            chosen = "auto" if strategy is None else forced(**strategy)
            trainer = L.Trainer(strategy=chosen, max_epochs=last_epoch, **settings)
            loader = DataLoader(TensorDataset(images, labels), batch_size=8)
            trainer.fit(module, loader, ckpt_path=saved)
            saved = Path(folder, "saved.ckpt")
            trainer.save_checkpoint(saved)
    return flat(module)


def forced(**arguments: Any) -> RingStrategy:
    """Several buckets, although the network is small."""
    if "algorithm" not in arguments:
        arguments["bucket_cap_mb"] = 0.01
    return RingStrategy(force_communication=True, **arguments)


def flat(module: nn.Module) -> Tensor:
    return torch.cat([param.detach().double().cpu().reshape(-1) for param in module.parameters()])


def compare(way: Way, device: str, plain: dict[str, Tensor]) -> dict[str, Any]:
    """``plain`` keeps what a plain device has trained, by what is asked of Trainer and module."""
    L.seed_everything(3, verbose=False)
    start, key = flat(Net()), str((way.trainer, way.module))
    if key not in plain:
        plain[key] = train(way, None, device)
    trained, norm = train(way, way.strategy, device), plain[key].norm()
    found = within(float((trained - plain[key]).norm() / norm), way.tolerance)
    moved = float((trained - start).norm() / norm)
    # Parameters that do not move agree, too.
    found["ok"] = found["ok"] and moved > MOVED
    return found | {"moved": moved, "bits": torch.equal(trained, plain[key])}


def main(device: str, tiny: bool) -> int:
    warnings.filterwarnings("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "lightning_ring"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # The same kernels in both runs: else the same bits cannot be asked for.
    torch.backends.cudnn.deterministic = True
    plain: dict[str, Tensor] = {}
    return report((way.name, partial(compare, way, device, plain)) for way in ways(device))
