"""HOROVOD_CPU_OPERATIONS: the library that moves CPU tensors."""

from __future__ import annotations

import os

from lightning_ring.errors import ConfigurationError

_VARIABLE = "HOROVOD_CPU_OPERATIONS"


def cpu_backend() -> str:
    """A backend of `open_communicator`: shared memory within a node where it is left open.

    Raises:
        ConfigurationError: The variable names another library.
    """
    text = os.environ.get(_VARIABLE, "")
    if text.lower() not in ("", "gloo", "mpi"):
        raise ConfigurationError(
            f"{_VARIABLE}={text!r}: expected GLOO or MPI. Leave it out for shared memory within a "
            "node, and the better of the two between nodes."
        )
    return text.lower() or "auto"
