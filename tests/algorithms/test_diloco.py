"""`DiLoCo` against the formula in NumPy."""

import numpy as np
import pytest
import torch

from lightning_ring.algorithms.local import DiLoCo
from tests.algorithms.local_training import NUM_STEPS, loss, network, trained


def reference(world_size, *, every, warmup):
    """Algorithm 1 of DiLoCo in NumPy, with SGD of learning rate 0.05 and momentum 0.9 as inner
    optimizer. The gradients are torch's.
    """
    nets = [network() for _ in range(world_size)]
    # share the networks' memory
    w = [[p.detach().numpy() for p in net.parameters()] for net in nets]
    inner = [[np.zeros_like(value) for value in own] for own in w]
    anchor, velocity = [value.copy() for value in w[0]], [np.zeros_like(value) for value in w[0]]
    found = [[] for _ in nets]
    for step in range(1, NUM_STEPS + 1):
        gradients = []
        for rank, net in enumerate(nets):
            net.zero_grad()
            loss(net, rank, step - 1).backward()
            gradients.append([p.grad.numpy() for p in net.parameters()])
        for rank in range(world_size):
            for value, gradient, momentum, all_ranks in zip(
                w[rank], gradients[rank], inner[rank], zip(*gradients, strict=True), strict=True
            ):
                momentum[:] = 0.9 * momentum + (
                    np.mean(all_ranks, 0) if step <= warmup else gradient
                )
                value -= np.float32(0.05) * momentum
        if step == warmup:
            anchor = [value.copy() for value in w[0]]
        elif step > warmup and (step - warmup) % every == 0:
            for m, start in enumerate(anchor):
                change = np.mean([start - own[m] for own in w], 0)
                velocity[m] = 0.9 * velocity[m] + change
                anchor[m] = start - 0.7 * (change + 0.9 * velocity[m])
                for own in w:
                    own[m][...] = anchor[m]
        for rank, own in enumerate(w):
            found[rank].append(torch.from_numpy(np.concatenate([value.ravel() for value in own])))
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("every", "warmup"), [(4, 2), (3, 0)])
def test_equals_the_formula(world_size, every, warmup):
    found = trained(world_size, DiLoCo(every, warmup_steps=warmup), "sgd")
    expected = reference(world_size, every=every, warmup=warmup)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=1e-4, atol=2e-6)
