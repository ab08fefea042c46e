"""Sharded optimizers: each rank steps its shard of the parameters and holds its shard of the
optimizer state.

1. A backward leaves the average in this rank's shard of each bucket (`reduce_scatter_`). After the
   first backward the buckets are laid out in the order of its gradients, and never again, because
   optimizer state is cut along them. Until then all ranks get whole averages.
2. ``param.grad`` becomes a `ShardedGradient`, which holds this rank's part. Elementwise operations
   work on the part; torch's loss scaler searches all ranks' parts for infinities; other operators
   raise.
3. A rank's part of a parameter is a 1-D view. It is cut parameter by parameter, so that groups,
   learning rates and the norms of LARS and LAMB keep their meaning.
4. Hooks on the user's own optimizer put these parts into ``param_groups`` during its step.
   Elsewhere, also inside a closure, ``param_groups`` holds the whole parameters. Ranks keep empty
   parts too: every rank then knows step counts, and vectors of norms have one length.
5. After the step an all-gather of each changed bucket starts, the first layers' bucket first. The
   memory of a parameter that has not arrived raises when its address is asked for (`memory`). A
   forward pre-hook of each module waits for the parameters that the module holds (`reads`).

A checkpoint gathers one bucket and one kind of state at a time, and rank 0 keeps the result on the
CPU. Loading keeps the ordinary state dict until the buckets are laid out, and cuts it then. Classes
that are known to be elementwise are listed in `elementwise`; any other class says so itself.
"""

from lightning_ring.algorithms.sharded.algorithm import Sharded

__all__ = ["Sharded"]
