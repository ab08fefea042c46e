"""Training through the Trainer on one GPU over real NCCL, in every way.

One rank trains a small network with ``force_communication=True``, so that all buckets and
collectives run, and again on a plain single device with the same seed: the parameters agree.
"""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ring import RingStrategy
from lightning_ring.algorithms.local import LocalSGD
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.gradients.compression import DGC, PowerSGD
from lightning_ring.optim import LAMB, LARS
from tests.gpu import DEVICE, ON_GPU
from tests.trainers import quiet_trainer

pytestmark = ON_GPU
# Relative norm of the difference. Formats that send less than the gradient, and the error of it
# later, train on a way of their own.
SAME, CLOSE, ROUNDED, APPROXIMATE = 0.0, 1e-5, 1e-2, 0.3
MOVED, STEPS = 1e-4, 3
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "lars": lambda params: LARS(params, lr=0.02),
    "lamb": lambda params: LAMB(params, lr=0.02),
}
COMPRESSORS = {
    **dict.fromkeys(("fp16", "bf16", "int8"), ROUNDED),
    **dict.fromkeys(("onebit", "terngrad", "topk", DGC(momentum=0.0)), APPROXIMATE),
    PowerSGD(rank=4, start_iter=1): APPROXIMATE,
}
# What is asked of Trainer and module on both sides.
SETTINGS = {
    "float32": ({}, {}),
    "bf16": ({"precision": "bf16-mixed"}, {}),
    "scaled": ({"precision": "16-mixed" if DEVICE == "cuda" else "bf16-mixed"}, {}),
    "clipped": ({"gradient_clip_val": 0.1}, {}),
    "accumulated": ({"accumulate_grad_batches": 2}, {}),
    "lars": ({}, {"optimizer": "lars"}),
    "lamb": ({}, {"optimizer": "lamb"}),
    "compiled": ({}, {"compiler": "inductor" if DEVICE == "cuda" else "aot_eager"}),
}


class Net(L.LightningModule):
    """Convolution, BatchNorm and linear layers."""

    def __init__(self, optimizer="sgd", channels_last=False, compiler=""):
        super().__init__()
        self.optimizer = optimizer
        convolution = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
        self.body = nn.Sequential(*convolution, nn.Linear(288, 40), nn.Tanh(), nn.Linear(40, 4))
        if channels_last:
            self.body.to(memory_format=torch.channels_last)
        if compiler:
            self.body.compile(backend=compiler)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.body(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer](self.parameters())


def flat(module):
    return torch.cat([param.detach().double().cpu().reshape(-1) for param in module.parameters()])


def train(strategy, trainer, module, folder=None):
    """The parameters after two epochs, with a ``folder`` the second in another Trainer."""
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(8 * STEPS, 3, 8, 8, generator=generator)
    labels = torch.randint(0, 4, (len(images),), generator=generator)
    settings = {
        "use_distributed_sampler": False,
        "accelerator": "gpu" if DEVICE == "cuda" else "cpu",
        "log_every_n_steps": 2,
        # Else Lightning looks for one, and raises where mpi4py has no MPI library.
        "plugins": [LightningEnvironment()] if strategy is None else None,
    }
    saved = None
    for last_epoch in (1, 2) if folder else (2,):
        L.seed_everything(3, verbose=False)
        net = Net(**module)
        chosen = (
            "auto" if strategy is None else RingStrategy(force_communication=True, **strategy())
        )
        fit = quiet_trainer(strategy=chosen, max_epochs=last_epoch, **settings, **trainer)
        fit.fit(net, DataLoader(TensorDataset(images, labels), batch_size=8), ckpt_path=saved)
        if folder:
            saved = folder / "saved.ckpt"
            fit.save_checkpoint(saved)
    return flat(net)


def agree(strategy, allowed, trainer=None, module=None, folder=None):
    # The same kernels in both runs: else the same bits cannot be asked for.
    torch.backends.cudnn.deterministic = True
    L.seed_everything(3, verbose=False)
    start = flat(Net())
    plain = train(None, trainer or {}, module or {})
    ours = train(strategy, trainer or {}, module or {}, folder)
    assert float((ours - plain).norm() / plain.norm()) <= allowed
    # Parameters that do not move agree, too.
    assert float((ours - start).norm() / plain.norm()) > MOVED


def ring(**arguments):
    """Several buckets, although the network is small."""
    return lambda: {"bucket_cap_mb": 0.01, **arguments}


def sharded(**arguments):
    return lambda: {"algorithm": Sharded(**arguments)}


@pytest.mark.parametrize("name", SETTINGS)
def test_ring(name):
    agree(ring(), CLOSE if name in ("clipped", "compiled") else SAME, *SETTINGS[name])


@pytest.mark.parametrize("name", SETTINGS)
def test_sharded(name):
    agree(sharded(), CLOSE, *SETTINGS[name])


@pytest.mark.parametrize("compression", COMPRESSORS, ids=str)
def test_compressors(compression):
    allowed = COMPRESSORS[compression]
    agree(ring(compression=compression), allowed)
    if compression in ("bf16", "int8"):
        agree(sharded(compression=compression), allowed)


def test_resumed(tmp_path):
    agree(ring(), SAME, folder=tmp_path)
    agree(sharded(), CLOSE, folder=tmp_path)


def test_options(tmp_path):
    agree(ring(monitor=False), SAME)
    agree(ring(timeline=tmp_path / "trace.json"), SAME)
    agree(ring(), SAME, module={"channels_last": True})
    agree(ring(compression="fp32"), SAME, {"precision": "bf16-true"})
    agree(ring(), CLOSE, SETTINGS["scaled"][0] | SETTINGS["clipped"][0])
    agree(lambda: {"algorithm": LocalSGD()}, CLOSE)
