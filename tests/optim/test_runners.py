"""Runners side by side: a `keep` that is a tensor (as it is on a device), and the memory that a step takes."""

import copy
import subprocess
import sys

import pytest
import torch

from tests.launch import ROOT, clean_env
from tests.optim.ways import (
    CPU_WAYS,
    INTERPRETED,
    every_optimizer,
    random_params,
    relative_difference,
    set_random_grads,
)

# The C++ kernel is for the CPU, where whether to move is known before it is called.
DEVICE_WAYS = {name: way for name, way in CPU_WAYS.items() if name != "fused" or INTERPRETED}


@every_optimizer
@pytest.mark.parametrize("way", DEVICE_WAYS.values(), ids=DEVICE_WAYS)
@pytest.mark.parametrize("bad", [False, True])
def test_a_step_can_be_skipped_without_reading_the_flag(optimizer_class, way, bad, monkeypatch):
    monkeypatch.setattr("lightning_ring.optim.update._as_host_bool", lambda flag: flag)
    params, others = random_params(dtype=torch.float32), random_params(dtype=torch.float32)
    optimizer = optimizer_class(params, lr=0.1, skip_nonfinite=True, **way)
    expected = optimizer_class(others, lr=0.1, foreach=False)
    for step in range(2):
        for o, p in ((optimizer, params), (expected, others)):
            set_random_grads(p, step)
            o.step()
    before = copy.deepcopy([(p.detach(), optimizer.state[p]) for p in params])
    if bad:
        set_random_grads(params, 2)
        params[6].grad.view(-1)[5] = float("nan")
        optimizer.step()
        for param, (values, state) in zip(params, before, strict=True):
            assert torch.equal(param, values)
            for key, value in state.items():
                assert torch.equal(optimizer.state[param][key], value)
    assert optimizer.skipped_steps == int(bad)
    for a, b in zip(params, others, strict=True):
        assert relative_difference(a, b) < 1e-6


MEASURE = """
import resource, sys, torch
from lightning_ring import optim
torch.set_num_threads(1)
size, count = 1 << 20, 40
params = [torch.ones(size, requires_grad=True) for _ in range(count)]
small = [torch.ones(64, requires_grad=True) for _ in range(100)]
for p in params + small:
    p.grad = torch.ones_like(p)
make = lambda p: getattr(optim, sys.argv[1])(p, lr=0.1, weight_decay=0.01, fused=sys.argv[2] == "fused" or None)
warm = [torch.ones(300_000, requires_grad=True)]
warm[0].grad = torch.ones_like(warm[0])
make(warm).step()  # threads, compiled code and one-time allocations
optimizer = make(params + small)
optimizer._collect(optimizer._current_roster())  # state is made here, at the first step
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
optimizer.step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / (4 * size * count))
"""


@every_optimizer
@pytest.mark.parametrize("way", ["default", "fused"])
def test_a_step_takes_less_than_five_percent_of_the_parameters_memory(optimizer_class, way):
    command = [sys.executable, "-c", MEASURE, optimizer_class.__name__, way]
    done = subprocess.run(command, env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.05


@every_optimizer
@pytest.mark.parametrize("way", CPU_WAYS.values(), ids=CPU_WAYS)
def test_the_bits_do_not_depend_on_the_run(optimizer_class, way):
    results = []
    for _ in range(2):
        params = random_params(dtype=torch.float32, shapes=[(200_000,), (30,)])
        optimizer = optimizer_class(params, lr=0.1, **way)
        for step in range(3):
            set_random_grads(params, step)
            optimizer.step()
        results.append(params)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
