"""What a script asks of Horovod's build, answered for this package."""

from __future__ import annotations

import importlib.util

import torch

from lightning_ring.horovod.context import context


def mpi_threads_supported() -> bool:
    """Always False: libraries other than ours may not count on several threads."""
    return False


def mpi_built(verbose: bool = False) -> bool:
    """Whether mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Whether MPI started the ranks."""
    return context().info.source == "mpi"


def gloo_built(verbose: bool = False) -> bool:
    """Always True: torch brings Gloo."""
    return True


def gloo_enabled() -> bool:
    """Whether MPI did not start the ranks."""
    return not mpi_enabled()


def nccl_built(verbose: bool = False) -> int:
    """NCCL's version, as 21805; 0 without it."""
    if not (torch.distributed.is_nccl_available() and torch.cuda.is_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10_000 + minor * 100 + patch)


def cuda_built(verbose: bool = False) -> bool:
    """Whether this torch is built for CUDA."""
    return torch.version.cuda is not None


def rocm_built(verbose: bool = False) -> bool:
    """Whether this torch is built for ROCm."""
    return torch.version.hip is not None


def ccl_built(verbose: bool = False) -> bool:
    """Always False: no backend uses this library."""
    return False


ddl_built = ccl_built
