"""Every way to read a parameter gives its new values, or is an error that says what to do: never
old values.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector
from torch.utils.checkpoint import checkpoint

from lightning_ring import RingStrategy
from tests.checks.models import Classifier, fit, loader
from tests.checks.sharded.arrival import doubled
from tests.checks.sharded.late import LateRing
from tests.checks.sharded.references import CAP, assert_same
from tests.strategies import ring

compiled = torch.compile(torch.mm, backend="eager")
# from a module and images; what it gives is added to the logits
Read = Callable[[Any, Tensor], Any]


class Reading(Classifier):
    """Reads its parameters in another way at each step, before any module is called that would
    wait for them.
    """

    def __init__(self, ways: dict[str, Read]) -> None:
        super().__init__()
        self.ways = ways
        self.kept: Any = None
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
        self.results: dict[str, float] = {}

    def loss(self, batch: Any) -> Tensor:
        step = self.trainer.global_step
        name = list(self.ways)[step % len(self.ways)]
        read = self.ways[name](self, batch[0].clone())
        if step:  # in the first step all are whole
            self.results[name] = float(torch.as_tensor(read).double().sum())
        logits = read + self.net(batch[0])
        # from the first step on parameters are in buckets
        if step == 1 and KEPT.keys() & self.ways:
            self.kept = (
                [p.detach() for p in self.parameters()]
                if "kept since the first step" in self.ways
                else []
            )
            self.arrays = [p.detach().numpy() for p in self.parameters()]
        return F.cross_entropy(logits, batch[1])

    def pure(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(self.net, params, (x,)).square().mean()

    @property
    def params(self) -> dict[str, Tensor]:
        return dict(self.net.named_parameters())


def _sum(values: Any) -> Any:
    leaves = torch.utils._pytree.tree_leaves(values)
    return sum(leaf.double().sum().float() for leaf in leaves)


class _Pair(NamedTuple):
    first: Tensor
    second: Tensor


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return weight.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


@torch.library.custom_op("lightning_ring_tests::total", mutates_args=())
def total(weight: Tensor) -> Tensor:
    return weight.sum()


@total.register_fake
def _(weight: Tensor) -> Tensor:
    return weight.new_empty(())


def _pickled(module: Any, _: Tensor) -> Any:
    file = io.BytesIO()
    torch.save(module.net, file)
    file.seek(0)
    return _sum(list(torch.load(file, weights_only=False).parameters())).detach()


def _vector(module: Any) -> Any:
    return parameters_to_vector(module.net.parameters())


def _higher_order(module: Any, x: Tensor) -> Any:
    params = list(module.params.values())
    with torch.enable_grad():
        grads = torch.autograd.grad(
            F.linear(x, params[0]).square().mean(), params[:1], create_graph=True
        )
    return _sum([grad.square() for grad in grads])


WAYS: dict[str, Read] = {  # the first one in the first step, in which `torch.func` is found
    "data": lambda m, x: _sum([p.data for p in m.parameters()]),
    "func.grad of values": lambda m, x: _sum(
        torch.func.grad(m.pure)({k: v.detach() for k, v in m.params.items()}, x)
    ),
    "func.jvp": lambda m, x: _sum(
        torch.func.jvp(
            lambda w: F.linear(x, w).sin().sum(), (m.net[0].weight,), (torch.ones(6, 8),)
        )
    ),
    "func.jacfwd": lambda m, x: _sum(
        torch.func.jacfwd(lambda w: F.linear(x, w).sin().mean(0))(m.net[0].weight)
    ),
    "func.hessian": lambda m, x: _sum(
        torch.func.hessian(lambda w: F.linear(x, w).sin().mean())(m.net[0].weight)
    ),
    "vmap of a module": lambda m, x: _sum(torch.vmap(m.net)(x)),
    "functional_call": lambda m, x: functional_call(
        m.net, {k: 2 * v for k, v in m.params.items()}, (x,)
    ),
    "autograd.functional": lambda m, x: _sum(
        torch.autograd.functional.hvp(
            lambda w: F.linear(x, w).sin().sum(), m.net[0].weight, torch.ones(6, 8)
        )
    ),
    "forward AD": lambda m, x: _forward_ad(m.net[0].weight, x),
    "grad with create_graph": _higher_order,
    "autograd.Function": lambda m, x: _Square.apply(m.net[0].weight).sum(),
    "custom op": lambda m, x: total(m.net[2].weight.detach()),
    "custom op of a parameter": lambda m, x: total(m.net[2].weight).detach(),
    "checkpoint": lambda m, x: checkpoint(m.net, x, use_reentrant=False),
    "reentrant checkpoint": lambda m, x: checkpoint(m.net, x.requires_grad_(), use_reentrant=True),
    "parameters_to_vector": lambda m, x: _vector(m).sum(),
    "numpy": lambda m, x: float(sum(p.detach().numpy().sum() for p in m.parameters())),
    "deepcopy": lambda m, x: copy.deepcopy(m.net)(x).detach(),
    "pickle": _pickled,
    "item": lambda m, x: m.net[0].weight[0, 0].item() + sum(m.net[2].bias.tolist()),
    "state_dict": lambda m, x: _sum(list(m.state_dict().values())),
    "foreach": lambda m, x: _sum(torch._foreach_mul([p.detach() for p in m.parameters()], 2.0)),
    "foreach norm": lambda m, x: _sum(torch._foreach_norm(list(m.parameters()))),
    "named tuple": lambda m, x: torch.cat(_Pair(m.net[0].bias, m.net[2].bias)).sum(),
}


TRANSFORMS: dict[str, Read] = {  # wrap a parameter without a call of torch
    "func.grad": lambda m, x: _sum(torch.func.grad(m.pure)(m.params, x)),
    "func.vjp": lambda m, x: _sum(
        torch.func.vjp(lambda p: m.pure(p, x), m.params)[1](torch.tensor(1.0))
    ),
    "func.jacrev": lambda m, x: _sum(
        torch.func.jacrev(lambda w: F.linear(x, w).sin().mean(0))(m.net[0].weight)
    ),
    "vmap over a parameter": lambda m, x: _sum(
        torch.vmap(lambda row: row.sin().sum())(m.net[0].weight)
    ),
    "vmap of gradients": lambda m, x: _sum(
        torch.vmap(torch.func.grad(m.pure), in_dims=(None, 0))(m.params, x)
    ),
}


# with an alias kept each step waits for all parameters: other ways would not be tried with these
KEPT: dict[str, Read] = {
    "kept since the first step": lambda m, x: _sum([p * 1 for p in m.kept]).detach(),
    "array kept since the first step": lambda m, x: float(sum(a.sum() for a in m.arrays)),
}


def _forward_ad(weight: Tensor, x: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(weight, torch.ones_like(weight))
        return torch.autograd.forward_ad.unpack_dual(F.linear(x, dual).sin()).tangent.sum()


def _in_a_thread(read: Callable[[], float]) -> float:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(read).result()


def _in_a_forked_child(read: Callable[[], float]) -> float:
    """What ``read`` gives in a child of this process, or its error."""
    receives, sends = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(sends, pickle.dumps(read()))
        except BaseException as error:
            os.write(sends, pickle.dumps(error))
        finally:
            os._exit(0)
    os.close(sends)
    with open(receives, "rb") as pipe:
        result = pickle.load(pipe)
    os.waitpid(child, 0)
    if isinstance(result, BaseException):
        raise result
    return result


UNSEEN: dict[str, Read] = {
    "a thread": lambda m, x: _in_a_thread(lambda: m.net[0].weight.sum().item()),
    "a forked child": lambda m, x: _in_a_forked_child(lambda: m.net[0].weight[0, 0].item()),
}


UNSEEN |= {
    "scripted": lambda m, x: doubled(x, m.net[0].weight.t()).sum(),
    "compiled": lambda m, x: compiled(x, m.net[0].weight.t()).sum(),
}

# a module that is called waits for its parameters, and so does state_dict
RIGHT = {"vmap of a module", "checkpoint", "reentrant checkpoint", "state_dict", *KEPT}


def _results(ways: dict[str, Read], *, sharded: bool) -> Reading:
    """One step more than there are ways: the first one reads whole parameters."""
    L.seed_everything(7, verbose=False)
    module = Reading(ways)
    strategy = ring(sharded, LateRing if sharded else RingStrategy, bucket_cap_mb=CAP)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(strategy, module, loader(8 * (len(ways) + 1)), max_epochs=1)
    return module


def check_every_way_to_read_is_right_or_an_error() -> None:
    refused = set()
    for name, read in (WAYS | TRANSFORMS | UNSEEN | KEPT).items():
        # what is kept is taken in the step before
        ways = {"state_dict": WAYS["state_dict"], "checkpoint": WAYS["checkpoint"], name: read}
        expected = _results(ways, sharded=False).results
        try:
            found = _results(ways, sharded=True).results
        except RuntimeError as error:
            if not re.search(r"was read before its new values.*wait_parameters", str(error)):
                raise
            refused.add(name)
        else:
            assert found == expected, name
    assert not refused & RIGHT, refused
    assert {"data", "item", "numpy", "a thread", "deepcopy"} <= refused


def check_every_way_to_read_is_right_after_wait_parameters() -> None:
    ways = {
        name: lambda m, x, read=read: (m.trainer.strategy.wait_parameters(), read(m, x))[1]
        for name, read in (WAYS | TRANSFORMS | UNSEEN).items()
        if name != "data"
    }
    ways = {"data": lambda m, x: (m.trainer.strategy.wait_parameters(), 0.0)[1]} | ways
    found, expected = (_results(ways, sharded=sharded) for sharded in (True, False))
    assert found.results == expected.results
    assert_same(found, expected)
