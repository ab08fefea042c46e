"""Layers that random programs are built of. Each maps (rows, 6) to (rows, 6).

``raw`` is the program's input, the same bits under every strategy; ``rank`` the rank whose rows
these are; ``step`` the number of the training step. The text of the classes that a program uses is
copied into its script (`script.py`), so they use what a script imports: ``torch``, ``nn``, ``F``
and ``checkpoint``.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

RANKS = 2  # a script sets its own


class Linear(nn.Module):
    def __init__(self, hidden=6):
        super().__init__()
        self.a = nn.Linear(6, hidden)
        self.b = nn.Linear(hidden, 6, bias=False)

    def forward(self, x, raw, rank, step):
        return x + torch.tanh(self.b(torch.tanh(self.a(x))))


class Large(Linear):
    """Several buckets of a few KiB."""

    def __init__(self):
        super().__init__(hidden=300)


class Norm(nn.LayerNorm):
    def __init__(self):
        super().__init__(6)

    def forward(self, x, raw, rank, step):
        return super().forward(x)


class Conv(nn.Module):
    """Weights and gradients in channels_last; ``norm`` adds BatchNorm (a bias before it gets
    rounding errors only).
    """

    def __init__(self, norm=False):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=not norm),
            nn.BatchNorm2d(4) if norm else nn.Identity(),
        )
        self.out = nn.Conv2d(4, 1, 2, padding=(0, 1)).to(memory_format=torch.channels_last)

    def forward(self, x, raw, rank, step):
        image = x.reshape(-1, 1, 2, 3)
        hidden = torch.tanh(self.net(image)).to(memory_format=torch.channels_last)
        return x + F.pad(self.out(hidden), (0, 0, 0, 1))[:, :, :, :3].reshape(-1, 6)


class Twice(nn.Module):
    """One module called twice: its gradient is a sum of two."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x, raw, rank, step):
        return torch.tanh(self.a(torch.tanh(self.a(x))))


class Shapes(nn.Module):
    """A scalar, one element, two equal scalars, no element at all, and a transposed matrix."""

    def __init__(self):
        super().__init__()
        self.scalar, self.same = nn.Parameter(torch.tensor(0.9)), nn.Parameter(torch.tensor(0.9))
        self.one = nn.Parameter(torch.ones(1))
        self.none = nn.Parameter(torch.empty(0))
        self.transposed = nn.Parameter((torch.eye(6) + 0.1 * torch.randn(6, 6)).t())

    def forward(self, x, raw, rank, step):
        return self.scalar * (x @ self.transposed) + self.one * self.same + self.none.sum()


class Parametrized(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))

    def forward(self, x, raw, rank, step):
        return x + torch.tanh(self.a(x))


class Tied(nn.Module):
    """One Parameter in two modules."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight

    def forward(self, x, raw, rank, step):
        return self.b(torch.tanh(self.a(x)))


class Embedded(nn.Module):
    """Rows of a table, and the same table read by a function and not by its module."""

    def __init__(self, sparse=False):
        super().__init__()
        self.table, self.sparse = nn.Embedding(8, 6, sparse=sparse), sparse

    def forward(self, x, raw, rank, step):
        rows = self.table((raw[:, 0].abs() * 4).long().clamp(max=7))
        return x + rows if self.sparse else x + rows + 0.1 * F.linear(x, self.table.weight)[:, :6]


class Method(nn.Module):
    """Weights read in a method that is not ``forward``, from a ParameterList and a
    ParameterDict.
    """

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([torch.eye(6), torch.zeros(6)])
        self.more = nn.ParameterDict({"gain": torch.ones(6)})

    def transform(self, x):
        return torch.tanh(F.linear(x, *self.weights)) * self.more["gain"]

    def forward(self, x, raw, rank, step):
        return self.transform(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(2, 2, batch_first=True)

    def forward(self, x, raw, rank, step):
        return x + self.gru(x.reshape(-1, 3, 2))[0].reshape(-1, 6)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixing = nn.Parameter(torch.randn(6, 6, dtype=torch.complex128))

    def forward(self, x, raw, rank, step):
        return x + (x.to(torch.complex128) @ self.mixing).real.to(x.dtype)


class EveryOtherStep(Linear):
    """Used in every other step only, on all ranks."""

    def forward(self, x, raw, rank, step):
        return super().forward(x, raw, rank, step) if step % 2 == 0 else x


class OnOneRank(Linear):
    """Used on one rank only, on another one in each step."""

    def forward(self, x, raw, rank, step):
        return super().forward(x, raw, rank, step) if rank == step % RANKS else x


class Unused(Linear):
    def forward(self, x, raw, rank, step):
        return x


class Raises(nn.Module):
    """Its backward raises in every third step, on all ranks."""

    class Fault(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("planted")

    def forward(self, x, raw, rank, step):
        if step % 3 != 1 or not torch.is_grad_enabled():
            return x
        # on ranks that use no layer too
        return self.Fault.apply(x if x.requires_grad else x.detach().requires_grad_())


class Frozen(Linear):
    def __init__(self):
        super().__init__()
        self.a.requires_grad_(False)


class Dropped(nn.Dropout):
    def __init__(self):
        super().__init__(0.2)

    def forward(self, x, raw, rank, step):
        return super().forward(x)


class Checkpointed(nn.Module):
    """Another layer under activation checkpointing, called once or twice."""

    def __init__(self, inner, reentrant, calls=1):
        super().__init__()
        self.inner, self.reentrant, self.calls = inner, reentrant, calls

    def forward(self, x, raw, rank, step):
        if self.reentrant and torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # else reentrant checkpoints have no gradient
        for _ in range(self.calls):
            x = checkpoint(self.inner, x, raw, rank, step, use_reentrant=self.reentrant)
        return x
