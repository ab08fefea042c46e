"""Ranks and devices for Lightning, the same for its Trainer and for Fabric."""
