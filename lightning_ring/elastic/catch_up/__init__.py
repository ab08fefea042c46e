"""Sends the state of a training from a rank to a process that is about to join, while all ranks
train on.

1. Each rank has a `Source`. It sends parameters and optimizer state in pieces, while forward and
   backward run: they do not change then.
2. A step changes the parameters that were sent. For each step the source therefore also sends the
   averaged gradients of these parameters, and the newcomer's `Stream` takes the same step with
   them.
3. When all parameters were sent, the newcomer has taken as many steps as the ranks.

A wrong catch-up costs time, and changes no result: when the newcomer joins, digests are compared,
and tensors that differ are sent again.
"""
