"""Servers that hold the parameters, which ranks send gradients to."""

from lightning_ring.algorithms.server.worker import ParameterServer

__all__ = ["ParameterServer"]
