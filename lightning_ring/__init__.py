"""Synchronous data-parallel training for PyTorch Lightning over a ring all-reduce."""

__version__ = "0.1.0"
