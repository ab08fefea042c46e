"""Images for training: packed into shards, read back, decoded."""

from lightning_ring.data.shards.dataset import ShardDataset

__all__ = ["ShardDataset"]
