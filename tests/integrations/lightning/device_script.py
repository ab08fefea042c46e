"""One rank alone trains a small network in every way, all collectives running, and compares with a
plain device.

``python -m tests.integrations.lightning.device_script cuda``; ``cpu`` walks the same way without a
GPU and a loss scaler.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ring import RingStrategy
from lightning_ring.gradients.compression import PowerSGD
from lightning_ring.optim import LAMB
from tests.strategies import ring

STEPS = 12


class Net(L.LightningModule):
    """Channels-last convolution, BatchNorm and linear layers. (A bias before BatchNorm has
    rounding for a gradient.)
    """

    def __init__(self, lamb: bool) -> None:
        super().__init__()
        self.lamb = lamb
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(288, 40),
        )
        self.head = nn.Linear(40, 4)
        self.body.to(memory_format=torch.channels_last)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.head(self.body(batch[0]).tanh()), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        if self.lamb:
            return LAMB(self.parameters(), lr=0.02)
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def train(strategy: Any, device: str, lamb: bool = False, **kwargs: Any) -> Tensor:
    L.seed_everything(3, verbose=False)
    images, labels = torch.randn(8 * STEPS, 3, 8, 8), torch.randint(0, 4, (8 * STEPS,))
    module = Net(lamb)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        max_epochs=1,
        log_every_n_steps=2,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        # else Lightning loads MPI to look for ranks, and fails where mpi4py finds no library
        plugins=[LightningEnvironment()] if strategy == "auto" else None,
        **kwargs,
    )
    trainer.fit(module, DataLoader(TensorDataset(images, labels), batch_size=8))
    return torch.cat([param.detach().double().cpu().reshape(-1) for param in module.parameters()])


def forced(**kwargs: Any) -> RingStrategy:
    return ring(**({"force_communication": True, "bucket_cap_mb": 0.01, "sharded": False} | kwargs))


def main(device: str) -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning").setLevel(logging.WARNING)
    scaled = "16-mixed" if device == "cuda" else "bf16-mixed"
    trace = Path(tempfile.mkdtemp(), "trace.json")
    close, rounded, approximate = 1e-4, 3e-2, 0.1
    ways: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
        "buckets": ({}, {}, close),
        "monitor and timeline": ({"timeline": trace}, {}, close),
        "automatic sizes": ({"bucket_cap_mb": "auto"}, {}, close),
        "clipped": ({}, {"gradient_clip_val": 0.1}, close),
        "accumulated": ({}, {"accumulate_grad_batches": 2}, close),
        "fp16": ({"compression": "fp16"}, {}, rounded),
        "bf16": ({"compression": "bf16"}, {}, rounded),
        "powersgd": ({"compression": PowerSGD(rank=4, start_iter=1)}, {}, approximate),
        "mixed precision": ({}, {"precision": scaled}, rounded),
        "sharded": ({"sharded": True}, {}, close),
        "sharded, clipped": ({"sharded": True}, {"gradient_clip_val": 0.1}, close),
        "sharded, mixed precision": ({"sharded": True}, {"precision": scaled}, rounded),
        "sharded LAMB": ({"sharded": True}, {"lamb": True}, close),
        "sharded, bf16, automatic sizes": (
            {"sharded": True, "compression": "bf16", "bucket_cap_mb": "auto"},
            {},
            rounded,
        ),
    }
    plain: dict[str, Tensor] = {}
    for name, (arguments, settings, tolerance) in ways.items():
        key = str(settings)
        if key not in plain:
            plain[key] = train("auto", device, **settings)
        trained = train(forced(**arguments), device, **settings)
        difference = float((trained - plain[key]).norm() / plain[key].norm())
        print(f"{name}: differs by {difference:.1e}", flush=True)
        assert difference <= tolerance, name
    L.seed_everything(3, verbose=False)
    torch.randn(8 * STEPS, 3, 8, 8), torch.randint(0, 4, (8 * STEPS,))
    start = torch.cat([param.detach().double().reshape(-1) for param in Net(False).parameters()])
    moved = float((plain[str({})] - start).norm() / start.norm())
    assert moved > 2 * approximate, f"training moved by {moved:.1e} only: nothing was compared"
    events = json.loads(trace.read_text())["traceEvents"]
    assert any(event.get("args", {}).get("kind") == "all_reduce" for event in events)
    assert any(event["name"] == "backward" for event in events)


if __name__ == "__main__":
    main(sys.argv[1])
