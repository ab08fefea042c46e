"""The state of a training, from a rank to a process that is about to join, while all ranks train on.

A `Source` in each rank sends parameters and optimizer state, a few at a time, straight from their memory while forward
and backward run, when they do not change. Those that it has sent change with the next step: behind that step it also
sends their averaged gradients, and the newcomer's `Stream` takes the same step. Once all are sent the newcomer is as
far as the others.

Nothing relies on that: when the newcomer joins, digests are compared, and tensors that differ are sent again.
"""
