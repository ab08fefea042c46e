import torch
from torch import nn

from lightning_ring.optim import exclude_bias_and_norm


class RMSNormOfAModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


class NormedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)
        self.norm = RMSNormOfAModel()


def names_of(group):
    return {name for name, _ in group["params"]}


def test_biases_and_norms_are_excluded():
    model = nn.ModuleDict(
        {
            "conv": nn.Conv2d(3, 4, 3),
            "bn": nn.BatchNorm2d(4),
            "sync": nn.SyncBatchNorm(4),
            "ln": nn.LayerNorm(4),
            "gn": nn.GroupNorm(2, 4),
            "rms": nn.RMSNorm(4),
            "block": NormedBlock(),
            "attention": nn.MultiheadAttention(4, 2),
            "prelu": nn.PReLU(4),
        }
    )
    decayed, excluded = exclude_bias_and_norm(model, 1e-4)
    assert decayed["weight_decay"] == 1e-4
    assert "adapt" not in decayed
    assert (excluded["weight_decay"], excluded["adapt"]) == (0.0, False)
    assert names_of(decayed) == {
        "conv.weight",
        "block.conv.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "prelu.weight",
    }
    assert names_of(decayed) | names_of(excluded) == {name for name, _ in model.named_parameters()}
    assert not names_of(decayed) & names_of(excluded)


def test_tied_parameters_come_once():
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embedding"].weight
    (group,) = exclude_bias_and_norm(model, 0.1)
    assert names_of(group) == {"embedding.weight"}
