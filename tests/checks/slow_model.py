"""A module whose steps take known times: forward and backward sleep, layer by layer."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grad, None, None


class Slow(L.LightningModule):
    """Before the gradients of each of ``layers`` layers, the last one first, backward sleeps."""

    def __init__(
        self, layers: int = 3, forward: float = 0.004, backward: float = 0.01, width: int = 32
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.forward_seconds, self.backward_seconds = forward, backward

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        (x,) = batch
        for layer in self.layers:
            x = Sleep.apply(layer(x), self.forward_seconds, self.backward_seconds)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def batches(count: int, width: int = 32) -> DataLoader:
    x = torch.randn(4 * count, width, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x), batch_size=4)


def weights(module: nn.Module) -> Tensor:
    return torch.cat([param.detach().reshape(-1) for param in module.parameters()]).clone()
