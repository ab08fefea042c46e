"""`torch.compile` of the step."""

import pytest
import torch

from lightning_ring.optim.engine import compiler
from lightning_ring.optim.engine.trust_ratio import COMPILES
from tests.optim.ways import every_optimizer, random_params, relative_difference, set_random_grads


@pytest.mark.ranks
@pytest.mark.skipif(
    compiler.find_compiler() is None, reason="torch.compile needs a C++ compiler on the CPU"
)
@every_optimizer
@pytest.mark.parametrize("kwargs", [{}, {"skip_nonfinite": True}], ids=str)
def test_compiled_step_equals_eager(optimizer_class, kwargs):
    shapes = [(), (7,), (12, 5)]
    params, others = random_params(shapes=shapes), random_params(shapes=shapes)
    lr = torch.tensor(0.1, dtype=torch.float64)
    compiled = optimizer_class(params, lr=lr, weight_decay=0.01, **kwargs)
    eager = optimizer_class(others, lr=0.1, weight_decay=0.01, **kwargs)
    torch._dynamo.reset()
    step = torch.compile(compiled.step)
    frames = []
    for i in range(5):
        for p in (params, others):
            set_random_grads(p, i)
        lr.fill_(0.1 / (i + 1))
        eager.param_groups[0]["lr"] = 0.1 / (i + 1)
        step()
        eager.step()
        frames.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    for a, b in zip(params, others, strict=True):
        assert relative_difference(a, b) < 1e-12
    if COMPILES:
        assert frames[-1] > 0, "nothing was compiled"
    assert frames[-1] == frames[1], "it compiles anew at every step"
    torch.testing.assert_close(compiled.trust_ratios, eager.trust_ratios)
