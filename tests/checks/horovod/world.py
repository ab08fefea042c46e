"""What scripts for Horovod write again and again."""

import torch

import lightning_ring.horovod as hvd
from tests.checks.ranks import WORLD

RANK, SIZE = WORLD.rank, WORLD.size
torch.set_num_threads(1)


def distributed(module, lr=0.1, **options):
    """SGD of ``module``'s parameters, over all ranks."""
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    return hvd.DistributedOptimizer(
        optimizer, named_parameters=module.named_parameters(), **options
    )


def total(name=None, **options):
    """The sum of a one of each rank."""
    return hvd.allreduce(torch.ones(1), name=name, op=hvd.Sum, **options).item()


def assert_equal_everywhere(tensors):
    for tensor in tensors:
        own = tensor.detach().flatten().tolist()
        assert WORLD.allgather(own) == [own] * SIZE
