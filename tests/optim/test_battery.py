"""What every optimizer does, however it is run."""

import copy

import pytest
import torch

from tests.optim.oracles import ORACLES
from tests.optim.ways import (
    INTERPRETED,
    assert_equal,
    assert_near,
    every_optimizer,
    every_way,
    random_params,
    set_random_grads,
    take_steps,
)

LR = {"LARS": 0.5, "LAMB": 0.01}


def make(optimizer_class, params, way, **kwargs):
    return optimizer_class(
        params, **({"lr": LR.get(optimizer_class.__name__, 0.01)} | kwargs), **way
    )


def reference(optimizer_class, params, num_steps, **kwargs):
    """The same steps in float64 by the plain way, on copies of ``params``."""
    copies = [p.detach().double().cpu().clone().requires_grad_() for p in params]
    optimizer = make(optimizer_class, copies, {"foreach": False}, **kwargs)
    for step in range(num_steps):
        set_random_grads(params, step)
        for param, copied in zip(params, copies, strict=True):
            copied.grad = param.grad.double().cpu()
        optimizer.step()
    return copies


@every_optimizer
def test_has_an_oracle(optimizer_class):
    assert optimizer_class.__name__ in ORACLES, (
        "a new optimizer needs a float64 oracle in tests/optim/oracles.py"
    )


@every_optimizer
@every_way
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_dtypes(optimizer_class, way, dtype):
    params = random_params(dtype=dtype)
    expected = reference(optimizer_class, params, 3, weight_decay=0.01)
    optimizer = make(optimizer_class, params, way, weight_decay=0.01)
    take_steps(optimizer, params, 0, 3)
    # Triton's interpreter cuts bits off instead of rounding
    bfloat16 = 4e-2 if INTERPRETED else 2e-2
    tolerance = {
        torch.float64: 1e-13,
        torch.float32: 1e-6,
        torch.bfloat16: bfloat16,
        torch.float16: 2e-3,
    }[dtype]
    assert_near(params, expected, tolerance)
    for param in params:
        assert param.dtype == dtype
        for name in optimizer_class.state_names:
            assert optimizer.state[param][name].dtype == (
                dtype if dtype == torch.float64 else torch.float32
            )


@every_optimizer
@every_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_master_weights_keep_what_rounding_would_lose(optimizer_class, way, dtype):
    num_steps = 3 if INTERPRETED else 20
    params = random_params(dtype=dtype)
    expected = reference(optimizer_class, params, num_steps)
    optimizer = make(optimizer_class, params, way, master_weights=True)
    take_steps(optimizer, params, 0, num_steps)
    masters = [optimizer.state[param]["master"] for param in params]
    assert {master.dtype for master in masters} == {torch.float32}
    assert_near(masters, expected, 2e-6)
    if INTERPRETED:
        assert_near(params, masters, 8e-3)
    else:
        assert_equal(params, [master.to(dtype) for master in masters])


@every_optimizer
@every_way
def test_large_tensors_are_cut_into_pieces_without_seams(optimizer_class, way):
    # Under the interpreter, which is slow: three of a kernel's chunks, two, and two.
    sizes = (5001, 15) if INTERPRETED else (300_001, 1025)
    shapes = [(sizes[0],), (500, 7), (257, sizes[1])]
    params = random_params(shapes=shapes, dtype=torch.float64)
    expected = reference(optimizer_class, params, 3, weight_decay=0.01)
    take_steps(make(optimizer_class, params, way, weight_decay=0.01), params, 0, 3)
    assert_near(params, expected, 1e-13)


@every_optimizer
@every_way
def test_groups_have_their_own_hyperparameters(optimizer_class, way):
    params = random_params()
    settings = [{"weight_decay": 0.1}, {"adapt": False, "weight_decay": 0.0, "lr": 0.003}]
    optimizer = make(
        optimizer_class,
        [{"params": params[::2]} | settings[0], {"params": params[1::2]} | settings[1]],
        way,
    )
    expected = [reference(optimizer_class, params, 4, **setting) for setting in settings]
    take_steps(optimizer, params, 0, 4)
    assert_near(params, [expected[i % 2][i] for i in range(len(params))], 1e-13)


@every_optimizer
@every_way
def test_gradients_are_never_written(optimizer_class, way):
    for kwargs in ({}, {"maximize": True, "weight_decay": 0.1}, {"skip_nonfinite": True}):
        params = random_params(dtype=torch.float32)
        set_random_grads(params, 0)
        before = [(p.grad, p.grad.clone(), p.grad._version) for p in params]
        make(optimizer_class, params, way, **kwargs).step()
        for param, (grad, values, version) in zip(params, before, strict=True):
            assert param.grad is grad
            assert torch.equal(grad, values)
            assert grad._version == version


@every_optimizer
@every_way
def test_zero_gradients_leave_weight_decay_with_ratio_one(optimizer_class, way):
    params = random_params(shapes=[(4, 3), (5,)])
    before = [p.detach().clone() for p in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer = make(optimizer_class, params, way, lr=0.1, weight_decay=0.5)
    optimizer.step()
    # LARS measures the gradient: ratio 1, w -= lr wd w. LAMB measures wd w itself: ratio 1/wd, w -=
    # lr w.
    shrink = {"LARS": 0.05, "LAMB": 0.1}[optimizer_class.__name__]
    assert_near(params, [old * (1 - shrink) for old in before], 1e-14)


@every_optimizer
@every_way
def test_missing_gradients_leave_parameter_and_state_alone(optimizer_class, way):
    params = random_params()
    optimizer = make(optimizer_class, params, way)
    take_steps(optimizer, params, 0, 2)
    frozen, state = params[5].detach().clone(), copy.deepcopy(optimizer.state[params[5]])
    ratios = optimizer.trust_ratios
    set_random_grads(params, 2)
    params[5].grad = None
    optimizer.step()
    assert torch.equal(params[5], frozen)
    assert state.keys() == optimizer.state[params[5]].keys()
    for key, value in state.items():
        assert torch.equal(optimizer.state[params[5]][key], value)
    assert optimizer.trust_ratios[5] == ratios[5]
    assert optimizer.trust_ratios[6] != ratios[6]
    for param in params:
        param.grad = None
    optimizer.step()  # nothing to do


LAYOUTS = {
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(0, 3).contiguous().transpose(0, 3),
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "expanded_dim": lambda t: t[:1].as_strided((1, *t.shape[1:]), (999, *t[:1].stride()[1:])),
}


@every_optimizer
@every_way
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("same_grad_layout", [True, False])
def test_any_memory_layout(optimizer_class, way, layout, same_grad_layout):
    values = random_params(shapes=[(4, 6, 5, 3)])[0].detach()
    param = layout(values.clone()).requires_grad_()
    if layout is not LAYOUTS["expanded_dim"]:
        assert not param.is_contiguous()
    plain = param.detach().contiguous().clone().requires_grad_()
    optimizers = (
        make(optimizer_class, [param], way),
        make(optimizer_class, [plain], {"foreach": False}),
    )
    for step in range(3):
        set_random_grads([plain], step)
        param.grad = (
            layout(plain.grad.clone())
            if same_grad_layout and param.shape == values.shape
            else plain.grad
        )
        for optimizer in optimizers:
            optimizer.step()
    assert_near([param], [plain], 1e-13)


@every_optimizer
@every_way
@pytest.mark.parametrize("scale", [1e-36, 1e-30, 1e-20, 1e12, 1e18])
def test_huge_and_tiny_gradients_in_float32(optimizer_class, way, scale):
    """Squares that float32 cannot hold must not make a norm 0 or infinite."""
    params = random_params(dtype=torch.float32, shapes=[(6, 5), (400,)])
    copies = [p.detach().double().clone().requires_grad_() for p in params]
    optimizer = make(optimizer_class, params, way, weight_decay=1e-4)
    oracle = make(optimizer_class, copies, {"foreach": False}, weight_decay=1e-4)
    for step in range(2):
        set_random_grads(params, step)
        for param, copied in zip(params, copies, strict=True):
            param.grad *= scale
            copied.grad = param.grad.double()
        optimizer.step()
        oracle.step()
    assert_near(params, copies, 1e-6)
    torch.testing.assert_close(optimizer.trust_ratios, oracle.trust_ratios, rtol=1e-4, atol=0)


@every_optimizer
@every_way
@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_huge_and_tiny_weights_in_float32(optimizer_class, way, scale):
    params = [
        (p.detach() * scale).requires_grad_()
        for p in random_params(dtype=torch.float32, shapes=[(6, 5), (400,)])
    ]
    expected = reference(
        optimizer_class,
        params,
        2,
        weight_decay=0.0,
        **({"eps": 1e-6} if optimizer_class.__name__ == "LAMB" else {}),
    )
    take_steps(make(optimizer_class, params, way, weight_decay=0.0), params, 0, 2)
    assert_near(params, expected, 1e-6)


@every_optimizer
@every_way
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_skip_nonfinite_leaves_everything_untouched(optimizer_class, way, bad):
    params = random_params(dtype=torch.float32)
    optimizer = make(optimizer_class, params, way, skip_nonfinite=True)
    expected = reference(optimizer_class, params, 3)
    take_steps(optimizer, params, 0, 2)
    before = copy.deepcopy([(p.detach(), optimizer.state[p]) for p in params])
    set_random_grads(params, 7)
    params[6].grad.view(-1)[17] = bad
    optimizer.step()
    assert optimizer.skipped_steps == 1
    for param, (values, state) in zip(params, before, strict=True):
        assert torch.equal(param, values)
        for key, value in state.items():
            assert torch.equal(optimizer.state[param][key], value)
    take_steps(optimizer, params, 2, 3)
    assert optimizer.skipped_steps == 1
    assert_near(params, expected, 1e-6)


@every_optimizer
@every_way
def test_nonfinite_gradients_poison_their_parameter_by_default(optimizer_class, way):
    params = random_params(dtype=torch.float32)
    optimizer = make(optimizer_class, params, way)
    set_random_grads(params, 0)
    params[6].grad.view(-1)[17] = float("nan")
    optimizer.step()
    assert torch.isnan(params[6].view(-1)[17])
    assert torch.isfinite(params[7]).all()
    assert optimizer.skipped_steps == 0


@every_optimizer
@every_way
def test_closure_and_hooks(optimizer_class, way):
    params = random_params(shapes=[(4,)])
    optimizer = make(optimizer_class, params, way)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = params[0].square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > optimizer.step(closure).item()
    assert calls == ["pre", "post"] * 2


@every_optimizer
@every_way
def test_tensor_learning_rate(optimizer_class, way):
    params = random_params()
    expected = reference(optimizer_class, params, 3, lr=0.02)
    lr = torch.tensor(0.5)
    optimizer = make(optimizer_class, params, way, lr=lr)
    lr.fill_(0.02)
    take_steps(optimizer, params, 0, 3)
    assert_near(params, expected, 1e-7)  # 0.02 in float32


@every_optimizer
@every_way
def test_changes_are_seen_by_autograd(optimizer_class, way):
    param = torch.ones(3, requires_grad=True)
    optimizer = make(optimizer_class, [param], way)
    saved = (param * param).sum()
    param.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


@every_optimizer
@every_way
def test_moved_parameters_are_followed(optimizer_class, way):
    """``param.data = ...`` (as `Module.to` does) between steps must not leave the optimizer on
    the old memory.
    """
    params = random_params()
    expected = reference(optimizer_class, params, 3)
    optimizer = make(optimizer_class, params, way)
    take_steps(optimizer, params, 0, 1)
    for param in params:
        param.data = param.data.clone()
    take_steps(optimizer, params, 1, 3)
    assert_near(params, expected, 1e-13)
