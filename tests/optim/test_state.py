"""State goes through ``state_dict``, pickles and copies, over dtypes and ways to run."""

import copy
import io
import pickle

import pytest
import torch

from tests.optim.ways import (
    WAYS,
    assert_equal,
    assert_near,
    every_optimizer,
    every_way,
    random_params,
    set_random_grads,
    take_steps,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def continued(optimizer, params, others, other):
    """Load ``optimizer``'s state (through a file) and weights into ``other``; then both go on."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        for param, source in zip(others, params, strict=True):
            param.copy_(source)
    take_steps(optimizer, params, 3, 6)
    take_steps(other, others, 3, 6)


@every_optimizer
@every_way
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("master_weights", [False, True])
def test_round_trip_goes_on_bit_for_bit(optimizer_class, way, dtype, master_weights):
    options = way | {"master_weights": master_weights, "lr": 0.1}
    params, others = random_params(dtype=dtype), random_params(seed=1, dtype=dtype)
    optimizer, other = optimizer_class(params, **options), optimizer_class(others, **options)
    take_steps(optimizer, params, 0, 3)
    take_steps(other, others, 7, 8)  # what it had before must not matter
    continued(optimizer, params, others, other)
    assert_equal(params, others)
    for a, b in zip(params, others, strict=True):
        for key, value in optimizer.state[a].items():
            assert value.dtype == other.state[b][key].dtype
            assert torch.equal(value, other.state[b][key])


@every_optimizer
@every_way
def test_a_group_added_later_keeps_the_others_state(optimizer_class, way):
    whole, grown = random_params(shapes=[(5,), (6, 2)]), random_params(shapes=[(5,), (6, 2)])
    optimizer, growing = (
        optimizer_class(whole, lr=0.1, **way),
        optimizer_class(grown[:1], lr=0.1, **way),
    )
    for step in range(4):
        if step == 2:
            growing.add_param_group({"params": grown[1:]})
        for params, o in ((whole, optimizer), (grown, growing)):
            set_random_grads(params, step)
            if step < 2:
                params[1].grad = None
            o.step()
    assert_equal(whole, grown)


@every_optimizer
@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_across_dtypes_state_keeps_its_precision(optimizer_class, source, target):
    params, others = random_params(dtype=source), random_params(dtype=target)
    optimizer, other = optimizer_class(params), optimizer_class(others)
    take_steps(optimizer, params, 0, 2)
    other.load_state_dict(optimizer.state_dict())
    for a, b in zip(params, others, strict=True):
        for name in optimizer_class.state_names:
            saved, loaded = optimizer.state[a][name], other.state[b][name]
            assert loaded.dtype == (torch.float64 if target == torch.float64 else torch.float32)
            assert torch.equal(loaded, saved.to(loaded.dtype))
    take_steps(other, others, 2, 3)


@every_optimizer
@pytest.mark.parametrize("target", WAYS, ids=str)
@pytest.mark.parametrize("source", WAYS, ids=str)
def test_between_ways_to_run(optimizer_class, source, target):
    """How to run is this machine's affair: it is not loaded from the checkpoint."""
    params, others = random_params(), random_params(seed=1)
    optimizer, other = (
        optimizer_class(params, **WAYS[source]),
        optimizer_class(others, **WAYS[target]),
    )
    take_steps(optimizer, params, 0, 3)
    continued(optimizer, params, others, other)
    assert other.options == optimizer_class(random_params(), **WAYS[target]).options
    assert_near(params, others, 1e-13)


@every_optimizer
@pytest.mark.parametrize(
    "again",
    [
        lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()) or optimizer,
        copy.deepcopy,
    ],
    ids=["loaded", "copied"],
)
def test_kernels_find_hyperparameters_where_they_were(optimizer_class, again):
    optimizer = optimizer_class(random_params())
    expected = list(optimizer.hyperparameters(optimizer.param_groups[0]))
    for _ in range(2):
        optimizer = again(optimizer)
        assert list(optimizer.hyperparameters(optimizer.param_groups[0])) == expected


@every_optimizer
def test_loaded_state_shares_no_memory_with_the_checkpoint(optimizer_class):
    params, others = random_params(), random_params()
    optimizer, other = optimizer_class(params), optimizer_class(others)
    take_steps(optimizer, params, 0, 1)
    checkpoint = optimizer.state_dict()
    before = copy.deepcopy(checkpoint["state"])
    other.load_state_dict(checkpoint)
    take_steps(other, others, 1, 3)
    for i, state in before.items():
        for key, value in state.items():
            assert torch.equal(checkpoint["state"][i][key], value)


@every_optimizer
@every_way
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"]
)
def test_copies_go_on_alone(optimizer_class, way, duplicate):
    params = random_params()
    optimizer = optimizer_class(params, lr=0.1, skip_nonfinite=True, **way)
    take_steps(optimizer, params, 0, 2)
    copied = duplicate(optimizer)
    others = [p for group in copied.param_groups for p in group["params"]]
    take_steps(optimizer, params, 2, 4)
    take_steps(copied, others, 2, 4)
    assert_equal(params, others)


@every_optimizer
def test_hooks_of_others_see_and_change_what_is_loaded(optimizer_class):
    params, others = random_params(), random_params()
    optimizer, other = optimizer_class(params), optimizer_class(others)
    take_steps(optimizer, params, 0, 1)
    name = optimizer_class.state_names[0]

    def doubled(_, state_dict):
        state = {i: s | {name: s[name] * 2} for i, s in state_dict["state"].items()}
        return state_dict | {"state": state}

    seen = []
    other.register_load_state_dict_pre_hook(doubled)
    other.register_load_state_dict_post_hook(
        lambda o: seen.append(o.state[others[2]][name].clone())
    )
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(seen[0], optimizer.state[params[2]][name] * 2)


@every_optimizer
@every_way
def test_trust_ratios_can_be_read(optimizer_class, way):
    weight, bias, unused = random_params(shapes=[(4, 3), (4,), (2,)])
    groups = [
        {"params": [("layer.weight", weight)]},
        {"params": [("bias", bias), ("unused", unused)], "adapt": False},
    ]
    optimizer = optimizer_class(groups, lr=0.1, weight_decay=0.01, **way)
    assert torch.isnan(optimizer.trust_ratios).all()
    set_random_grads([weight, bias], 0)
    w, g = weight.detach().clone(), weight.grad
    optimizer.step()
    names = ["layer.weight", "bias", "unused"]
    named = dict(zip(names, optimizer.trust_ratios.tolist(), strict=True))
    if optimizer_class.__name__ == "LARS":
        expected = 0.001 * w.norm() / (g.norm() + 0.01 * w.norm())
    else:
        direction = g / (g.abs() + 1e-6) + 0.01 * w
        expected = w.norm() / direction.norm()
    assert named["layer.weight"] == pytest.approx(float(expected), rel=1e-9)
    assert named["bias"] == 1
    assert named["unused"] != named["unused"], "NaN until its first step"
    kept = optimizer.trust_ratios
    set_random_grads([weight, bias], 1)
    optimizer.step()
    assert float(kept[0]) == named["layer.weight"], (
        "what was read must not change with the next step"
    )
