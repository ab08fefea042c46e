"""The papers' formulas in NumPy: all ranks' gradients in, the average out, one step after
another.
"""

import math

import numpy as np

BLOCK = 256


def shards(x, size):
    """Of multiples of 128 bytes; the last ones may be shorter or empty."""
    length = math.ceil(len(x) / (32 * size)) * 32
    return np.split(x, [length * index for index in range(1, size)])


def blocks(x):
    return [slice(start, min(start + BLOCK, len(x))) for start in range(0, len(x), BLOCK)]


def rounded(x):
    """ZeRO++: each block as 8-bit numbers times max|x| / 127."""
    out = np.zeros_like(x)
    for block in blocks(x):
        scale = max(np.abs(x[block]).max(), np.float32(1e-30)) / np.float32(127)
        out[block] = np.round(x[block] * (np.float32(1) / scale)) * scale
    return out


def signs(x):
    """1-bit Adam: each block as signs times mean|x|."""
    out = np.zeros_like(x)
    for block in blocks(x):
        out[block] = np.abs(x[block]).mean(dtype=np.float64) * np.where(x[block] >= 0, 1, -1)
    return out


def int8():
    def step(gradients):
        size = len(gradients)
        parts = [shards(g, size) for g in gradients]
        means = [
            sum(rounded(parts[rank][owner]) for rank in range(size)) / size for owner in range(size)
        ]
        if size == 2:  # both know all values after the first leg
            return np.concatenate(means)
        return np.concatenate([rounded(mean.astype(np.float32)) for mean in means])

    return step


def onebit():
    """Algorithm 1 of 1-bit Adam without its optimizer: an error a rank, and one an owner."""
    errors = []
    owed = []

    def step(gradients):
        size = len(gradients)
        errors.extend(np.zeros_like(g) for g in gradients[len(errors) :])
        owed.extend(np.zeros_like(part) for part in shards(gradients[0], size)[len(owed) :])
        sent = []
        for rank, gradient in enumerate(gradients):
            wanted = gradient + errors[rank]
            sent.append([signs(part) for part in shards(wanted, size)])
            errors[rank] = wanted - np.concatenate(sent[rank])
        out = []
        for owner in range(size):
            wanted = sum(sent[rank][owner] for rank in range(size)) / size + owed[owner]
            out.append(signs(wanted))
            owed[owner] = wanted - out[owner]
        return np.concatenate(out)

    return step


def topk(ratio):
    """Algorithm 1 of Stich et al. with the largest elements."""
    memories = []

    def step(gradients):
        memories.extend(np.zeros_like(g) for g in gradients[len(memories) :])
        total = np.zeros_like(gradients[0])
        for rank, gradient in enumerate(gradients):
            memories[rank] = memories[rank] + gradient
            chosen = np.argsort(-np.abs(memories[rank]))[: math.ceil(ratio * len(gradient))]
            total[chosen] += memories[rank][chosen]
            memories[rank][chosen] = 0
        return total / len(gradients)

    return step


def dgc(ratios, momentum, clip_norm, layers):
    """Algorithm 4 of DGC, with a ratio for each step; with 1 or more over all ranks a step is
    momentum SGD's.
    """
    u = []
    v = []
    left = list(ratios)

    def step(gradients):
        size, ratio = len(gradients), left.pop(0)
        u.extend(np.zeros_like(g) for g in gradients[len(u) :])
        v.extend(np.zeros_like(g) for g in gradients[len(v) :])
        total = np.zeros_like(gradients[0])
        for rank, raw in enumerate(gradients):
            gradient = raw.copy()
            for layer in layers:
                norm = np.linalg.norm(gradient[layer].astype(np.float64))
                gradient[layer] *= min(1.0, size**-0.5 * clip_norm / norm)
            u[rank] = momentum * u[rank] + gradient
            v[rank] = v[rank] + u[rank]
            count = math.ceil(ratio * len(gradient))
            whole = ratio * size >= 1
            chosen = np.arange(len(gradient)) if whole else np.argsort(-np.abs(v[rank]))[:count]
            total[chosen] += v[rank][chosen]
            v[rank][chosen] = 0
            if not whole:
                u[rank][chosen] = 0
        return total / size

    return step


def terngrad_scalers(gradients, layers, clip):
    """Section 5: each layer clipped at ``clip`` standard deviations; the largest magnitude left
    on any rank.
    """
    scalers = []
    for layer in layers:
        each = [
            (np.abs(g[layer]).max(), clip * math.sqrt(np.mean(g[layer].astype(np.float64) ** 2)))
            for g in gradients
        ]
        scalers.append(max(min(most, limit) for most, limit in each))
    return scalers
