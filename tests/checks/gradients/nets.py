"""Networks whose gradients are reduced, and the same in one process on all ranks' batches."""

import copy
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_ring.comm.communicator import ReduceOp
from lightning_ring.gradients.reducer import Reducer
from tests.checks.world import communicator

torch.set_num_threads(1)


class Recorder:
    """Passes everything on to ``comm`` and notes what leaves, and which gradients exist by then."""

    def __init__(self, comm, module):
        self._comm = comm
        self._module = module
        self.sent = []
        self.elements = 0
        self.produced = set()
        self.produced_when_sent = []

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def all_reduce_(self, tensor, *, op=ReduceOp.SUM, name=""):
        self.sent.append(name)
        self.elements += tensor.numel()
        self.produced_when_sent.append(len(self.produced))
        return self._comm.all_reduce_(tensor, op=op, name=name)


class Net(nn.Module):
    """Six layers, float64; ``path`` says which are used, in order; segments of two may be
    checkpointed.
    """

    def __init__(self, reentrant=None):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(6)])
        self.reentrant = reentrant
        self.double()

    def _segment(self, x, *indices):
        for index in indices:
            x = torch.tanh(self.layers[index](x))
        return x

    def forward(self, x, path=(0, 1, 2, 3, 4, 5)):
        for first in range(0, len(path), 2):
            pair = path[first : first + 2]
            if self.reentrant is None:
                x = self._segment(x, *pair)
            else:
                x = checkpoint(self._segment, x, *pair, use_reentrant=self.reentrant)
        return x.square().mean()


def make(cap_mb=0.0006, **kwargs):
    """A net, its copy for the comparison, and a reducer whose buckets hold about one layer each."""
    torch.manual_seed(0)
    net = Net(**kwargs)
    reference = copy.deepcopy(net)
    reference.reentrant = None
    warnings = []
    comm = Recorder(communicator(), net)
    for name, param in net.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: comm.produced.add(name))
    reducer = Reducer(comm, net.named_parameters(), bucket_cap_mb=cap_mb, warn=warnings.append)
    return net, reference, reducer, comm, warnings


def batches(step=0):
    """The batch of every rank, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    size = communicator().world_size
    return [torch.randn(4, 8, dtype=torch.float64, generator=generator) for _ in range(size)]


def mine(xs):
    # reentrant checkpointing wants an input with gradient
    return xs[communicator().rank].clone().requires_grad_()


def reference_mean(reference, xs, *path):
    (sum(reference(x, *path) for x in xs) / len(xs)).backward()


def assert_same(net, reference, *, rtol=1e-12):
    for (name, param), expected in zip(net.named_parameters(), reference.parameters(), strict=True):
        if expected.grad is None:
            assert param.grad is None, f"{name} has a gradient, expected none"
            continue
        assert param.grad is not None, f"{name} has no gradient"
        torch.testing.assert_close(
            param.grad, expected.grad, rtol=rtol, atol=1e-14, msg=lambda m, n=name: f"{n}: {m}"
        )
    grads = [param.grad for param in net.parameters() if param.grad is not None]
    flat = torch.cat([grad.reshape(-1).double() for grad in grads]) if grads else torch.zeros(0)
    for other in communicator().all_gather(flat):
        assert torch.equal(other, flat), "ranks hold different bits"


@contextmanager
def fresh_gradients(*modules, set_to_none=True):
    for module in modules:
        module.zero_grad(set_to_none=set_to_none)
    yield
