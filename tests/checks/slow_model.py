"""A module whose steps take known times: forward and backward sleep, layer by layer."""

import time

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None, None


class Slow(L.LightningModule):
    """Before the gradients of each of ``layers`` layers, the last one first, backward sleeps."""

    def __init__(self, layers=3, forward=0.004, backward=0.01, width=32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.forward_seconds, self.backward_seconds = forward, backward

    def training_step(self, batch, batch_idx):
        (x,) = batch
        for layer in self.layers:
            x = Sleep.apply(layer(x), self.forward_seconds, self.backward_seconds)
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def batches(count, width=32):
    x = torch.randn(4 * count, width, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x), batch_size=4)


def weights(module):
    return torch.cat([param.detach().reshape(-1) for param in module.parameters()]).clone()
