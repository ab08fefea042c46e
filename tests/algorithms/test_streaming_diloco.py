"""`DiLoCo` with fragments, overlap and few bits against the formula in NumPy."""

import numpy as np
import pytest
import torch

from lightning_ring.algorithms.local import DiLoCo
from lightning_ring.gradients.compression.between_nodes import BetweenNodes
from lightning_ring.gradients.compression.blocks import SHARD_VALUES
from tests.algorithms.local_training import (
    NUM_STEPS,
    begin,
    loss,
    network,
    one_step,
    trained,
    vector,
)
from tests.thread_ranks import run_ranks


def streaming_reference(world_size, *, every, warmup, fragments, overlap, share, bits):
    """Algorithm 2 of Streaming DiLoCo in NumPy, with SGD of learning rate 0.05 and momentum 0.9 as
    inner optimizer.

    ``fragments``: the numbers of their parameters. The gradients are torch's.
    """
    nets = [network() for _ in range(world_size)]
    # share the networks' memory
    w = [[p.detach().numpy() for p in net.parameters()] for net in nets]
    inner = [[np.zeros_like(value) for value in own] for own in w]
    anchor, velocity = [value.copy() for value in w[0]], [np.zeros_like(value) for value in w[0]]
    under_way = {}
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
        local = step - warmup
        for number, members in enumerate(fragments):
            ends = (number + 1) * every // len(fragments)
            if local >= ends and (local - ends) % every == 0:
                flat = [
                    np.concatenate([(anchor[m] - own[m]).ravel() for m in members]) for own in w
                ]
                mean = two_legs(flat, bits)
                cuts = np.cumsum([anchor[m].size for m in members])[:-1]
                under_way[number] = np.split(mean, cuts)
            if local >= ends + overlap and (local - ends - overlap) % every == 0:
                for m, change in zip(members, under_way.pop(number), strict=True):
                    change = change.reshape(anchor[m].shape)
                    velocity[m] = 0.9 * velocity[m] + change
                    anchor[m] = anchor[m] - 0.7 * (change + 0.9 * velocity[m])
                    for own in w:
                        own[m][...] = share * own[m] + (1 - share) * anchor[m]
        for rank, own in enumerate(w):
            found[rank].append(torch.from_numpy(np.concatenate([value.ravel() for value in own])))
    return found


def test_a_checkpoint_of_other_ranks_begins_a_new_round_without_what_was_on_its_way():
    def save(comm):
        algorithm = DiLoCo(4, fragments=2, overlap=3)
        net, optimizer = begin(algorithm, comm, "adamw")
        for _ in range(6):
            one_step(net, optimizer, algorithm, comm.rank)
        return algorithm.state_dict()

    state = run_ranks(3, save)[0]
    assert state["under_way"].keys() == {0, 1}

    def load(comm):
        algorithm = DiLoCo(4, fragments=2, overlap=3)
        net, optimizer = begin(algorithm, comm, "adamw")
        assert "in a new round" in algorithm.load_state_dict(comm.broadcast_object(state))
        assert algorithm.num_steps == 4
        for _ in range(9):
            one_step(net, optimizer, algorithm, comm.rank)
        algorithm.show_averages()
        return vector(net)

    first, other = run_ranks(2, load)
    assert torch.equal(first, other)
    assert first.isfinite().all()


def two_legs(values, bits):
    """The average of the ranks' vectors; each shard's messages to its owner and back are
    rounded. Two ranks need no way back.
    """
    length = -(-len(values[0]) // (len(values) * SHARD_VALUES)) * SHARD_VALUES
    cuts = [length * rank for rank in range(1, len(values))]
    shards = [np.split(own, cuts) for own in values]
    means = [
        np.mean([rounded(own[owner], bits) for own in shards], 0) for owner in range(len(values))
    ]
    return np.concatenate(means if len(values) == 2 else [rounded(one, bits) for one in means])


def rounded(values, bits):
    """To 8 bits, or to 4 in E3M0, in blocks of 256 with the scale of the largest."""
    out = values.copy()
    for start in range(0, len(values), 256) if bits < 32 else ():
        block = values[start : start + 256]
        largest = np.abs(block).max()
        if bits == 8:
            out[start : start + 256] = np.round(block * (127 / largest)) * (largest / 127)
        else:
            levels = largest * np.array([0, *(2.0 ** -np.arange(7))])
            nearest = np.abs(np.abs(block)[:, None] - levels).argmin(1)
            out[start : start + 256] = np.sign(block) * levels[nearest]
    return out


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        (
            DiLoCo(4, warmup_steps=2),
            {"every": 4, "warmup": 2, "fragments": [[0, 1, 2, 3]], "overlap": 0, "share": 0},
        ),
        (
            DiLoCo(4, fragments=2),
            {"every": 4, "fragments": [[0], [1, 2, 3]], "overlap": 0, "share": 0},
        ),
        (
            DiLoCo(5, overlap=2),
            {"every": 5, "fragments": [[0, 1, 2, 3]], "overlap": 2, "share": 0.5},
        ),
        (
            DiLoCo(4, fragments=3, overlap=3, warmup_steps=2, outer_bits=4),
            {
                "every": 4,
                "warmup": 2,
                "fragments": [[0], [1], [2, 3]],
                "overlap": 3,
                "share": 0.5,
                "bits": 4,
            },
        ),
        (
            DiLoCo(3, outer_bits=8),
            {"every": 3, "fragments": [[0, 1, 2, 3]], "overlap": 0, "share": 0, "bits": 8},
        ),
    ],
    ids=["plain", "fragments", "overlap", "all of it in 4 bits", "8 bits"],
)
def test_equals_the_formula_of_streaming_diloco(world_size, algorithm, settings):
    if isinstance(algorithm._compressor, BetweenNodes):
        algorithm._compressor.min_numel = 0  # the network has 66 parameters
    found = trained(world_size, algorithm, "sgd")
    expected = streaming_reference(world_size, **({"warmup": 0, "bits": 32} | settings))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=1e-4, atol=2e-6)
