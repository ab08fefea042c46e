"""Ranks and collectives: who takes part, and how tensors travel between them."""
