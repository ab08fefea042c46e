"""The numbers of a step on the Triton way: few operations beside the kernels, torch's values."""

import pytest
import torch

from lightning_ring.optim import LAMB
from lightning_ring.optim.engine.fused import FusedRun
from tests.operations import Operations
from tests.optim.test_sent_tables import Launches, launches  # noqa: F401
from tests.optim.ways import INTERPRETED, every_optimizer, random_params, set_random_grads


@pytest.mark.usefixtures("launches")
@every_optimizer
@pytest.mark.parametrize("capturable", [False, True])
def test_a_step_has_few_operations_beside_its_kernels(optimizer_class, capturable):
    params = random_params(dtype=torch.float32)
    optimizer = optimizer_class(params, lr=0.1, fused=True, capturable=capturable)
    set_random_grads(params, 0)
    for _ in range(2):
        optimizer.step()
    with Operations() as operations:
        optimizer.step()
    names = [name for name in operations.names if not name.startswith("profiler.")]
    launched = [name for name in names if not name.startswith("empty")]
    # The step count: one more, the same for all parameters (read where it is on the CPU), and kept.
    counting = ["add_", "copy_", "aminmax", *["_local_scalar_dense"] * 2]
    assert launched == (counting if optimizer_class.counts_steps else [])
    assert len(names) - len(launched) <= 3


GROUPS = {
    "LAMB": [
        {"betas": (0.0, 0.99), "bias_correction": False, "weight_decay": 0.0, "adapt": False},
        {"trust_clip": 0.5, "eps": 1e-3, "maximize": True},
    ],
    "LARS": [
        {"nesterov": True, "weight_decay": 0.0, "adapt": False},
        {"momentum_form": "paper", "trust_coefficient": 0.1, "maximize": True},
    ],
}
OPTIONS = {
    "eager": {},
    "capturable": {"capturable": True},
    "clipped": {"max_grad_norm": 0.5},
    "sharded": {},
}


@pytest.mark.skipif(not INTERPRETED, reason="test_under_the_interpreter runs this")
@every_optimizer
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize(("lr_is_tensor", "some_odd"), [(False, True), (True, False)])
def test_interpreted_kernels_compute_torchs_numbers(
    optimizer_class, options, lr_is_tensor, some_odd, monkeypatch
):
    """Odd gradients: one lies otherwise than its parameter, so that the plain way takes it, and
    another one is missing.
    """
    if "max_grad_norm" in options and optimizer_class is not LAMB:
        pytest.skip("LAMB alone clips")
    finished = []
    move = FusedRun.move
    monkeypatch.setattr(
        FusedRun, "move", lambda self, **how: finished.append(self) or move(self, **how)
    )
    steppers = []
    for way in ({"fused": True}, {"foreach": False}):
        params = random_params()
        lr = torch.tensor(0.1, dtype=torch.float64) if lr_is_tensor else 0.1
        first, second = GROUPS[optimizer_class.__name__]
        groups = [{"params": params[::2], "lr": lr} | first, {"params": params[1::2]} | second]
        optimizer = optimizer_class(groups, lr=0.1, weight_decay=0.01, **way, **options)
        if options is OPTIONS["sharded"]:
            optimizer.norm_all_reduce = lambda vector: 2 * vector
        steppers.append((params, optimizer))
    for step in range(3):
        for params, optimizer in steppers:
            set_random_grads(params, step)
            for group in optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(0.1 / (1 + step))
                else:
                    group["lr"] = 0.1 / (1 + step)
            if some_odd:
                params[5].grad = params[5].grad.T.contiguous().T
                params[2 + step].grad = None
            optimizer.step()
        assert len(finished) == step + 1, "the kernels did not run"
        ours, expected = (optimizer.trust_ratios for _, optimizer in steppers)
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0, equal_nan=True)
        for param, other in zip(steppers[0][0], steppers[1][0], strict=True):
            torch.testing.assert_close(param, other, rtol=1e-12, atol=1e-13)
    if optimizer_class.counts_steps:
        ours, expected = (optimizer._parameter_list.steps for _, optimizer in steppers)
        assert torch.equal(ours, expected)
