"""Every way to read a parameter gives its new values, or is an error that says what to do: never
old values.
"""

import contextlib
import copy
import io
import os
import pickle
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.nn.utils import vector_to_parameters
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint

from lightning_ring import RingStrategy, distribute
from lightning_ring.loops import distribute as distributing
from tests.checks.models import RANK, Classifier, fit, loader, parameters
from tests.checks.sharded.arrival import doubled
from tests.checks.sharded.late import Late, LateRing
from tests.checks.sharded.references import CAP, assert_same
from tests.strategies import ring

compiled = torch.compile(torch.mm, backend="eager")
# from a module and images; what it gives is added to the logits


class Reading(Classifier):
    """Reads its parameters in another way at each step, before any module is called that would
    wait for them.
    """

    def __init__(self, ways):
        super().__init__()
        self.ways = ways
        self.kept = None
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
        self.results = {}

    def loss(self, batch):
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

    def pure(self, params, x):
        return functional_call(self.net, params, (x,)).square().mean()

    @property
    def params(self):
        return dict(self.net.named_parameters())


def _sum(values):
    leaves = torch.utils._pytree.tree_leaves(values)
    return sum(leaf.double().sum().float() for leaf in leaves)


@torch.library.custom_op("lightning_ring_tests::total", mutates_args=())
def total(weight: Tensor) -> Tensor:
    return weight.sum()


@total.register_fake
def _(weight: Tensor) -> Tensor:
    return weight.new_empty(())


def _pickled(module, _):
    file = io.BytesIO()
    torch.save(module.net, file)
    file.seek(0)
    return _sum(list(torch.load(file, weights_only=False).parameters())).detach()


WAYS = {  # the first one in the first step, in which `torch.func` is found
    "data": lambda m, x: _sum([p.data for p in m.parameters()]),
    "func.grad of values": lambda m, x: _sum(
        torch.func.grad(m.pure)({k: v.detach() for k, v in m.params.items()}, x)
    ),
    "vmap of a module": lambda m, x: _sum(torch.vmap(m.net)(x)),
    "functional_call": lambda m, x: functional_call(
        m.net, {k: 2 * v for k, v in m.params.items()}, (x,)
    ),
    "custom op": lambda m, x: total(m.net[2].weight.detach()),
    "checkpoint": lambda m, x: checkpoint(m.net, x, use_reentrant=False),
    "numpy": lambda m, x: float(sum(p.detach().numpy().sum() for p in m.parameters())),
    "deepcopy": lambda m, x: copy.deepcopy(m.net)(x).detach(),
    "pickle": _pickled,
    "item": lambda m, x: m.net[0].weight[0, 0].item() + sum(m.net[2].bias.tolist()),
    "state_dict": lambda m, x: _sum(list(m.state_dict().values())),
    "foreach": lambda m, x: _sum(torch._foreach_mul([p.detach() for p in m.parameters()], 2.0)),
}


TRANSFORMS = {  # wrap a parameter without a call of torch
    "func.grad": lambda m, x: _sum(torch.func.grad(m.pure)(m.params, x)),
    "vmap of gradients": lambda m, x: _sum(
        torch.vmap(torch.func.grad(m.pure), in_dims=(None, 0))(m.params, x)
    ),
}


# with an alias kept each step waits for all parameters: other ways would not be tried with these
KEPT = {
    "kept since the first step": lambda m, x: _sum([p * 1 for p in m.kept]).detach(),
    "array kept since the first step": lambda m, x: float(sum(a.sum() for a in m.arrays)),
}


def _in_a_thread(read):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(read).result()


def _in_a_forked_child(read):
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


UNSEEN = {
    "a thread": lambda m, x: _in_a_thread(lambda: m.net[0].weight.sum().item()),
    "a forked child": lambda m, x: _in_a_forked_child(lambda: m.net[0].weight[0, 0].item()),
    "scripted": lambda m, x: doubled(x, m.net[0].weight.t()).sum(),
    "compiled": lambda m, x: compiled(x, m.net[0].weight.t()).sum(),
}

REFUSED = r"was read (before its new values|in a forked process).*wait_parameters"
# a module that is called waits for its parameters, and so does state_dict
RIGHT = {"vmap of a module", "checkpoint", "state_dict", *KEPT}


def _results(ways, *, sharded):
    """One step more than there are ways: the first one reads whole parameters."""
    L.seed_everything(7, verbose=False)
    module = Reading(ways)
    strategy = ring(sharded, LateRing if sharded else RingStrategy, bucket_cap_mb=CAP)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(strategy, module, loader(8 * (len(ways) + 1)), max_epochs=1)
    return module


def check_every_way_to_read_is_right_or_an_error():
    refused = set()
    for name, read in (WAYS | TRANSFORMS | UNSEEN | KEPT).items():
        # what is kept is taken in the step before
        ways = {"state_dict": WAYS["state_dict"], "checkpoint": WAYS["checkpoint"], name: read}
        expected = _results(ways, sharded=False).results
        try:
            found = _results(ways, sharded=True).results
        except RuntimeError as error:
            if not re.search(REFUSED, str(error)):
                raise
            refused.add(name)
        else:
            assert found == expected, name
    assert not refused & RIGHT, refused
    assert {"data", "item", "numpy", "a thread", "deepcopy"} <= refused


def check_every_way_to_read_is_right_after_wait_parameters():
    ways = {
        name: lambda m, x, read=read: (m.trainer.strategy.wait_parameters(), read(m, x))[1]
        for name, read in (WAYS | TRANSFORMS | UNSEEN).items()
        if name not in ("data", "a forked child")
    }
    ways = {"data": lambda m, x: (m.trainer.strategy.wait_parameters(), 0.0)[1]} | ways
    found, expected = (_results(ways, sharded=sharded) for sharded in (True, False))
    assert found.results == expected.results
    assert_same(found, expected)


class Parts(nn.Module):
    def __init__(self, width):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(6, width), nn.Linear(width, 3)
        # the last one has a bucket of its own
        self.square, self.sometimes = nn.Linear(6, 6), nn.Linear(6, 64)

    def forward(self, x, step):
        extra = self.sometimes(x).mean() if step % 2 else 0.0
        return (self.last(self.first(self.square(x)).tanh()) + extra - 0.5).square().mean()


class Loop:
    """A plain loop that calls ``do`` after each step, or with ``inside`` instead of it. What that
    notes, and the parameters in the end, are compared.
    """

    def __init__(self, make=None, width=16):
        self.module = Parts(width)
        self.optimizer = (make or _sgd)(self.module.parameters())
        self.notes = []
        self.kept = []
        self.step = 0
        self.training = None

    def run(self, algorithm, do, *, inside):
        connect, inputs = distributing._connect, torch.Generator().manual_seed(100 + RANK)
        with mock.patch.object(distributing, "_connect", lambda *a: _late(*connect(*a))):
            self.training = distribute(
                self.module, self.optimizer, algorithm=algorithm, bucket_cap_mb=CAP
            )
        try:
            for self.step in range(7):
                x = torch.randn(8, 6, generator=inputs)
                self.module(x, self.step).backward()
                if not inside:
                    self.optimizer.step()
                do(self)
                self.optimizer.zero_grad()
            self.training.close()
        finally:
            self.training._end(wait=False)  # nothing, if it was closed
        if self.kept:  # of memory that it held when the training ended
            with torch.no_grad():
                self.module.first.weight.mul_(2.0)
        return [
            torch.as_tensor(note) for note in [*self.notes, *self.kept, parameters(self.module)]
        ]

    def note(self):
        self.notes.append(parameters(self.module).sum())


def _late(job, comm, *others):
    return job, Late(comm), *others


def _sgd(params):
    return SGD(params, lr=0.3, momentum=0.9)


def _at(step, do):
    return lambda loop: do(loop) if loop.step == step else None


def _transpose(loop):
    loop.training.wait_parameters()
    weight = loop.module.square.weight
    weight.data = weight.data.t()


def _wait_in_a_mode(loop):
    with FakeTensorMode(allow_non_fake_inputs=True):
        loop.training.wait_parameters()


def _keep(loop):
    loop.training.wait_parameters()
    loop.kept = [param.detach() for param in loop.module.parameters()]


def _to_empty(loop):
    loop.module.to_empty(device="cpu")
    for param in loop.module.parameters():
        nn.init.constant_(param, 0.05)


def _read_in_a_child_later(loop):
    """In a child of two steps before: it has the values of that time."""
    if loop.step == 2:
        loop.training.wait_parameters()
        go, told = os.pipe()
        pool = ThreadPoolExecutor(1)
        read = lambda: (os.read(go, 1), parameters(loop.module).sum().item())[1]  # noqa: E731
        loop.optimizer.child = pool.submit(_in_a_forked_child, read), told
    elif loop.step == 4:
        child, told = loop.optimizer.child
        os.write(told, b".")
        loop.notes.append(child.result())


def _fork_state_dict(loop):
    loop.notes.append(
        _in_a_forked_child(lambda: float(_sum(list(loop.module.state_dict().values()))))
    )


class Elementwise(Optimizer):
    """Calls ``change`` for each parameter, and ``late`` at the end of its third step."""

    elementwise = True

    def __init__(self, params, change, late=lambda _: None):
        self.all = list(params)
        self.change, self.late, self.num_steps = change, late, 0
        super().__init__(self.all, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        self.num_steps += 1
        for param in self.param_groups[0]["params"]:
            self.change(param)
        if self.num_steps == 3:
            self.late(self)


def _decay(param):
    """Also without a gradient."""
    param.mul_(0.9)
    if param.grad is not None:
        param.sub_(param.grad, alpha=0.1)


def _replace(param):
    if param.grad is not None:
        param.data = param.data - 0.1 * param.grad


def _raise(_):
    raise ValueError("planted")


def _step_and_go_on(loop):
    with contextlib.suppress(ValueError):
        loop.optimizer.step()


def _hook(loop, *_):
    params = loop.optimizer.param_groups[0]["params"]
    loop.notes.append(sum(param.detach().double().sum() for param in params))


def _step_with_a_new_pre_hook(loop):
    if loop.step == 3:
        loop.optimizer.register_step_pre_hook(lambda *_: _hook(loop))
    loop.optimizer.step()


def _with_a_post_hook(params):
    optimizer = _sgd(params)
    kept = optimizer.param_groups[0]["params"][0]
    optimizer.register_step_post_hook(lambda *_: optimizer.defaults.update(lr=kept.sum().item()))
    return optimizer


# after a step, and instead of it
AFTER = {
    "vector_to_parameters": _at(
        2,
        lambda loop: vector_to_parameters(
            torch.linspace(-1, 1, parameters(Loop().module).numel()), loop.module.parameters()
        ),
    ),
    "param.data": _at(
        3, lambda loop: setattr(loop.module.first.weight, "data", torch.full((16, 6), 0.01))
    ),
    "to_empty": _at(3, _to_empty),
    "param.data.t()": _at(2, _transpose),
    "a mode": _wait_in_a_mode,
    "aliases past the end": _at(2, _keep),
    "state_dict in a thread": lambda loop: loop.notes.append(
        _in_a_thread(lambda: float(_sum(list(loop.module.state_dict().values()))))
    ),
    "state_dict in a child": _at(2, _fork_state_dict),
    "a child of two steps before": _read_in_a_child_later,
    "a read": Loop.note,
}
INSTEAD = {
    "weights without a gradient": (_step_and_go_on, lambda p: Elementwise(p, _decay)),
    "weights replaced": (_step_and_go_on, lambda p: Elementwise(p, _replace)),
    "a step that raises": (_step_and_go_on, lambda p: Elementwise(p, _decay, _raise)),
    "a read at the end of a step": (
        _step_and_go_on,
        lambda p: Elementwise(p, _decay, lambda self: sum(float(q.sum()) for q in self.all)),
    ),
    "an early post-hook": (_step_and_go_on, _with_a_post_hook),
    "a late pre-hook": (_step_with_a_new_pre_hook, None),
}
ERRORS = {
    "state_dict in a child": "in a forked process",
    "a child of two steps before": "in a forked process",
    "a read": "before its new values",
    "a step that raises": "did not end on this rank",
    "a read at the end of a step": "before its new values",
    "an early post-hook": "before its new values",
}


def check_loops_that_write_or_read_between_steps_are_right_or_an_error():
    programs = INSTEAD | {name: (do, None) for name, do in AFTER.items()}
    wrong = {}
    for name, (do, make) in programs.items():
        # a bucket of more than 16 KiB lies in memory that other processes change
        width = 1024 if name.startswith("a child") else 16
        inside, told = name in INSTEAD, ""
        expected = Loop(make, width).run("ring", do, inside=inside)
        try:
            found = Loop(make, width).run("ring_sharded", do, inside=inside)
        except RuntimeError as error:
            found, told = [], str(error)
        if name in ERRORS:
            right = ERRORS[name] in told and re.search("wait_parameters|from a checkpoint", told)
        else:
            right = len(found) == len(expected) and all(
                torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-6)
                for a, b in zip(found, expected, strict=True)
            )
        if not right:
            wrong[name] = told or "other values"
    assert not wrong, wrong
