"""Runs scripts that import Horovod by its own name."""
