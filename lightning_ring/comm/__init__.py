"""Ranks and collectives: who takes part, and how tensors travel between them."""

from lightning_ring.comm.communicator import Communicator, CompletedWork, ReduceOp, Work, shard, shard_bounds

__all__ = ["Communicator", "CompletedWork", "ReduceOp", "Work", "shard", "shard_bounds"]
