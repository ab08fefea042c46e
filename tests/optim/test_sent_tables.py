"""Tables of addresses: each step's kernels get those of now, and a graph keeps those it captured.

The launches are recorded instead of run, so that no GPU and no Triton are needed.
"""

import weakref

import pytest
import torch
from torch.nn import Parameter

from lightning_ring.optim.engine import fused, sent_tables
from tests.optim.ways import every_optimizer


class Launches:
    """Stands for the module of kernels; keeps the arguments of each launch by kernel."""

    COLUMNS = 11
    tl = torch  # which gives dtypes the same names

    def __init__(self):
        self.arguments = {}

    def __getattr__(self, name):
        return Launch(self.arguments, name)


class Launch:
    def __init__(self, arguments, name):
        self._arguments = arguments
        self._name = name

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments, MOVE=None, **constants):
        name = self._name if MOVE is None else "move" if MOVE else "measure"
        self._arguments[name] = arguments


@pytest.fixture
def launches(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    launches = Launches()
    monkeypatch.setattr(fused, "kernels", lambda: launches)
    monkeypatch.setattr("lightning_ring.optim.engine.options.triton_is_here", lambda: True)
    return launches


def _make(optimizer_class):
    params = [Parameter(torch.randn(shape)) for shape in ((4, 3), (5,), (1,))]
    _new_grads(params)
    return optimizer_class(params, lr=0.1, fused=True), params


def _new_grads(params):
    """Other gradients; returns the old ones, whose memory must not be taken again."""
    old = [param.grad for param in params]
    for param in params:
        param.grad = torch.randn_like(param)
    return [grad for grad in old if grad is not None]


def _replace_state(optimizer, params):
    name = optimizer.state_names[-1]
    optimizer.state[params[1]][name] = optimizer.state[params[1]][name].clone()


def _move_state(optimizer, params):
    state = optimizer.state[params[2]][optimizer.state_names[-1]]
    state.data = state.data.clone()


CHANGES = {
    "a gradient is replaced": lambda _, params: setattr(params[0], "grad", params[0].grad.clone()),
    "a gradient's data is replaced": lambda _, params: setattr(
        params[0].grad, "data", params[0].grad.data.clone()
    ),
    "a weight's data is replaced": lambda _, params: setattr(
        params[1], "data", params[1].data.clone()
    ),
    "a weight is larger": lambda _, params: [
        setattr(params[1], "data", torch.randn(6)),
        setattr(params[1], "grad", torch.randn(6)),
    ],
    "a state is replaced": _replace_state,
    "a state's data is replaced": _move_state,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
@every_optimizer
def test_the_next_step_reads_where_the_tensors_are(launches, optimizer_class, change):
    optimizer, params = _make(optimizer_class)
    for _ in range(2):
        optimizer.step()
    # Their memory must not be given to what replaces them.
    held = [t.data for p in params for t in (p, p.grad, *optimizer.state[p].values())]
    change(optimizer, params)
    if params[1].numel() == 6:
        for name in optimizer.state_names:
            optimizer.state[params[1]][name] = torch.zeros(6)
    optimizer.step()
    for kernel in ("measure", "move"):
        chunks, pointers, *_ = launches.arguments[kernel]
        assert pointers[:, :-1].tolist() == [
            [
                tensor.data_ptr()
                for tensor in (p, p.grad, *(optimizer.state[p][n] for n in optimizer.state_names))
            ]
            for p in params
        ]
        assert chunks[:, 2].tolist() == [p.numel() for p in params]
    del held


@every_optimizer
def test_a_graph_keeps_the_tables_it_captured(launches, optimizer_class, monkeypatch):
    optimizer, params = _make(optimizer_class)
    optimizer.step()
    monkeypatch.setattr(sent_tables, "captured", lambda device: True)
    optimizer.step()
    seen = {
        (kernel, place): (weakref.ref(launches.arguments[kernel][place]), content)
        for kernel in ("measure", "move")
        for place in (0, 1)
        for content in [launches.arguments[kernel][place].clone()]
    }
    monkeypatch.setattr(sent_tables, "captured", lambda device: False)
    launches.arguments.clear()
    held = [_new_grads(params)]
    optimizer.step()
    for (kernel, place), (table, content) in seen.items():
        kept = table()
        assert kept is not None, "the graph would read memory that was given back"
        assert torch.equal(kept, content), "the graph would read other addresses"
        if place == 1:
            assert launches.arguments[kernel][place] is not kept
    del held


@every_optimizer
def test_an_eager_step_uses_no_table_that_a_capture_made(launches, optimizer_class, monkeypatch):
    """The copy to the device was only recorded: before the first replay nothing is there."""
    optimizer, params = _make(optimizer_class)
    monkeypatch.setattr(sent_tables, "captured", lambda device: True)
    optimizer.step()
    made = launches.arguments["measure"][:2]
    monkeypatch.setattr(sent_tables, "captured", lambda device: False)
    optimizer.step()
    for captured, eager in zip(made, launches.arguments["measure"][:2], strict=True):
        assert eager is not captured
        assert torch.equal(eager, captured)
    assert len(params) == 3
