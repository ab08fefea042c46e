"""What bad input gets: an error that says what was found and what was expected."""

import pytest
import torch
from torch import nn

from lightning_ring.optim import LAMB, LARS, exclude_bias_and_norm
from tests.optim.ways import every_optimizer, every_way, random_params

NAN = float("nan")
OUT_OF_RANGE = [
    (cls, name, value)
    for cls, bad in {
        LARS: {
            "lr": [-0.1, NAN, float("inf"), "fast"],
            "momentum": [-0.1, 1.0, NAN],
            "weight_decay": [-1e-4, NAN],
            "trust_coefficient": [0, -1, NAN],
            "eps": [-1e-8, NAN],
            "momentum_form": ["goyal", None],
        },
        LAMB: {
            "lr": [-0.1, NAN, torch.tensor(-1.0), torch.ones(2)],
            "betas": [(1.0, 0.9), (-0.1, 0.9), (0.9, 1.0), (0.9,), 0.9, (0.9, NAN)],
            "eps": [-1e-8, NAN],
            "weight_decay": [-1e-4, NAN],
            "trust_clip": [0.0, -1.0, NAN],
            "max_grad_norm": [0.0, -1.0, NAN],
        },
    }.items()
    for name, values in bad.items()
    for value in values
]


@pytest.mark.parametrize(("cls", "name", "value"), OUT_OF_RANGE, ids=str)
def test_hyperparameters_out_of_range(cls, name, value):
    with pytest.raises(ValueError, match=rf"{name}.*expected"):
        cls(random_params(), **{name: value})
    if name != "max_grad_norm":
        params = random_params()
        optimizer = cls(params[:2])
        with pytest.raises(ValueError, match=rf"{name}.*expected"):
            optimizer.add_param_group({"params": params[2:], name: value})
        assert len(optimizer.param_groups) == 1, "a refused group must not stay"


def test_nesterov_needs_momentum():
    with pytest.raises(ValueError, match="nesterov=True with momentum=0"):
        LARS(random_params(), momentum=0.0, nesterov=True)


@every_optimizer
def test_unknown_key_in_a_group(optimizer_class):
    with pytest.raises(
        ValueError, match=r"unknown keys \['weight_deacy'\]; known are .*'weight_decay'"
    ):
        optimizer_class([{"params": random_params(), "weight_deacy": 0.1}])


@every_optimizer
@pytest.mark.parametrize(
    "params", [[], [{"params": []}], [{"params": []}, {"params": []}]], ids=str
)
def test_no_parameters(optimizer_class, params):
    with pytest.raises(ValueError, match=r"empty parameter list|no parameters"):
        optimizer_class(params)


@every_optimizer
def test_groups_handed_in_stay_as_they_are(optimizer_class):
    groups = [{"params": random_params()}]
    optimizer_class(groups)
    assert list(groups[0]) == ["params"]


@every_optimizer
@every_way
def test_sparse_gradient_names_the_parameter(optimizer_class, way):
    embedding = nn.Embedding(10, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    named = optimizer_class(embedding.named_parameters(), **way)
    with pytest.raises(RuntimeError, match=r"gradient of weight is sparse .*sparse=False"):
        named.step()
    unnamed = optimizer_class([torch.ones(2, requires_grad=True), embedding.weight], **way)
    with pytest.raises(RuntimeError, match=r"parameter 1 of group 0 \(shape \(10, 3\)\) is sparse"):
        unnamed.step()


@every_optimizer
def test_complex_and_integer_parameters_are_named(optimizer_class):
    with pytest.raises(ValueError, match=r"rotation is torch.complex64"):
        optimizer_class([("rotation", torch.ones(2, dtype=torch.complex64, requires_grad=True))])
    with pytest.raises(ValueError, match=r"parameter 1 of group 0 .* is torch.int64"):
        optimizer_class([torch.ones(2), torch.ones(3, dtype=torch.int64)])


@every_optimizer
def test_two_ways_at_once(optimizer_class):
    with pytest.raises(ValueError, match="choose one"):
        optimizer_class(random_params(), foreach=True, fused=True)
    with pytest.raises(ValueError, match="choose one"):
        optimizer_class(random_params(), capturable=True, skip_nonfinite=True)


@every_optimizer
def test_fused_on_another_device(optimizer_class):
    with pytest.raises(
        ValueError, match="fused=True has kernels for cuda, found a parameter on meta"
    ):
        optimizer_class([torch.ones(2, device="meta", requires_grad=True)], fused=True)


def test_module_without_parameters():
    with pytest.raises(ValueError, match="ReLU has no parameters"):
        exclude_bias_and_norm(nn.ReLU(), 0.1)
