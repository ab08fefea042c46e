"""Synchronous data parallelism: every backward averages gradients over the ranks."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_ring.algorithms.algorithm import Algorithm, Backwards, LocalBackwards, Tell, log
from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.cost import FIRST_BUCKET_MB, default_cap_mb
from lightning_ring.comm.recording import unrecorded
from lightning_ring.comm.replicate import broadcast_tensors, params_of
from lightning_ring.comm.waiting import let_senders_finish
from lightning_ring.errors import ConfigurationError, RingError
from lightning_ring.gradients.backward import check_outside_backward
from lightning_ring.gradients.compression import COMPRESSORS, Compressor, ErrorFeedback
from lightning_ring.gradients.reducer import Reducer
from lightning_ring.gradients.sparse import sparse_weights


class Averaging(Algorithm):
    """Every backward of the training averages gradients over all ranks, in buckets, while it runs.

    Each rank holds all parameters and all optimizer state, and takes the same step.
    ``strategy="ring"``.

    Args:
        bucket_cap_mb: Bucket size in MiB; `None` chooses by device and number of ranks.
        compression: Name of a compressor, a `Compressor`, or `None` to send gradients in their own
            dtype.
        shards: Leave each rank only its part of an average (`ShardedAverages`), for an algorithm
            on top of this one.
        on_new_parameters: Called after parameters were added, before their values are broadcast.
    """

    def __init__(
        self,
        *,
        bucket_cap_mb: float | None = None,
        compression: str | Compressor | None = None,
        shards: bool = False,
        on_new_parameters: Callable[[], None] | None = None,
    ) -> None:
        name = "Sharded" if shards else "Averaging"
        self._compression = check_wire(name, bucket_cap_mb, compression, shards=shards)
        self.reducer: Reducer | None = None
        self._names: list[list[str]] = []  # of the parameters in each bucket, once they are gone
        self._asked_to_stop = False  # a signal may come before `attach`
        self._bucket_cap_mb = bucket_cap_mb
        self._shards = shards
        self._on_new_parameters = on_new_parameters
        self._compressor: Compressor | None = None
        self._optimizers: Sequence[Optimizer] = ()

    mirrors_shards: bool = False  # there are no shards
    mirror_order: Sequence[int] | None = None

    # -- begin and end

    def attach(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        comm: Communicator,
        warn: Tell = log.warning,
        inform: Tell = log.info,
    ) -> None:
        self._module, self._comm = module, comm
        # a new one, without the residual of an earlier training
        self._compressor = copy.deepcopy(self._compression)
        if self._compressor is not None:
            let_senders_finish()
        # not a subclass's, which needs what follows
        Averaging.set_optimizers(self, optimizers)
        device = next((param.device.type for param in module.parameters()), "cpu")
        self._cap_mb = self._bucket_cap_mb or default_cap_mb(device, comm.world_size)
        self.reducer = Reducer(
            comm,
            module.named_parameters(),
            bucket_cap_mb=self._cap_mb,
            compressor=self._compressor,
            shards=self._shards,
            warn=warn,
            sparse_weights=functools.partial(sparse_weights, module),
        )
        self.reducer.stop_requested = self._asked_to_stop

    def set_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        if self._compressor is not None:
            self._compressor.check_optimizers(optimizers)
        self._optimizers = optimizers

    def detach(self, *, wait: bool = True) -> None:
        if self.reducer is not None:
            self._names = self.reducer.layout.names
            self.reducer.remove()
        self.reducer = None
        self._optimizers = ()

    def refusal_of_deaths(self) -> str:
        if isinstance(self._compression, ErrorFeedback):
            return (
                f"compression {self._compression.name!r} keeps each rank's rounding errors, which "
                "would die with it"
            )
        return ""

    def before_commit(self) -> None: ...

    def after_commit(self) -> None: ...

    def move(self, comm: Communicator) -> None: ...

    # -- a batch

    def begin_batch(self, active_ranks: int | None = None) -> None:
        self._training.note_raised()
        self._training.active_ranks = active_ranks
        broadcast_tensors(self._track_new_parameters(), unrecorded(self._comm))

    def _track_new_parameters(self) -> list[Parameter]:
        """Put parameters that were added or thawed after the start (fine-tuning callbacks) into
        buckets.

        Only parameters of an optimizer cause a search. Returns the new parameters, the same on all
        ranks.
        """
        reducer = self._training
        params = [param for optimizer in self._optimizers for param in params_of(optimizer)]
        if all(reducer.is_tracked(param) or not param.requires_grad for param in params):
            return []
        new = reducer.track(self._module.named_parameters())
        if self._on_new_parameters is not None:
            self._on_new_parameters()
        return new

    def forward(self, *, wait: bool = True) -> AbstractContextManager[None]:
        return split_at_buckets(self._cap_mb)

    @contextmanager
    def backward(self) -> Iterator[None]:
        self._track_new_parameters()
        with self._training.backward():
            yield

    @property
    def backwards(self) -> Backwards:  # type: ignore[override]
        return self.reducer if self.reducer is not None else LocalBackwards()

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        if self.steps_tracked_parameters(optimizer):
            check_outside_backward(optimizer)
            self._training.finish()
        if has_closure:
            return
        params = params_of(optimizer)
        self._training.check_reduced(params)
        # The backward of a plain loop cannot look for new parameters first.
        trained = (param for param in params if param.grad is not None and param.requires_grad)
        late = {param for param in trained if not self._training.is_tracked(param)}
        for name, param in self._module.named_parameters() if late else ():
            if param in late:
                raise RingError(
                    f"an optimizer is about to step {name} with a gradient of this rank alone. The "
                    "parameter was added or became trainable after the module's last forward, or "
                    "its optimizer was built later. Before the backward, call the whole module, "
                    "not only a part of it. In a plain loop, register a new optimizer before that "
                    "call: training.add_optimizers([optimizer])."
                )

    def after_step(self, optimizer: Optimizer) -> None:
        if self.steps_tracked_parameters(optimizer):
            self._training.num_steps += 1

    def steps_tracked_parameters(self, optimizer: Optimizer) -> bool:
        return any(map(self._training.is_tracked, params_of(optimizer)))

    @property
    def _training(self) -> Reducer:
        assert self.reducer is not None, "attach() comes first"
        return self.reducer

    # -- checkpoints, requests

    def state_dict(self) -> dict[str, Any]:
        if self._compressor is None:
            return {}
        state = self._compressor.state_dict(unrecorded(self._comm))
        # a bucket's gradients are rounded together: which ones share it decides the bits
        names = self._names if self.reducer is None else self.reducer.layout.names
        buckets = {"cap": self._bucket_cap_mb, "names": names}
        return {"compressor": self._compressor.name, "state": state, "buckets": buckets}

    def load_state_dict(self, state: dict[str, Any]) -> str:
        compressor = self._compressor
        if compressor is None:
            return ""
        buckets = state.get("buckets", {})
        if self.reducer is not None and buckets and buckets["cap"] == self._bucket_cap_mb:
            self.reducer.restore(buckets["names"])
        saved = state["state"] if state.get("compressor") == compressor.name else {}
        if "errors" in saved and not isinstance(compressor, ErrorFeedback):
            saved = {}
        comm = self._comm
        return compressor.load_state_dict(saved, comm.rank, comm.world_size) or ""

    def ask_to_stop(self, asked: bool = True) -> None:
        self._asked_to_stop = asked
        if self.reducer is not None:
            self.reducer.stop_requested = asked

    def agreed_to_stop(self) -> bool:
        return self._training.agreed_to_stop()

    def progress(self) -> str:
        return f"backward {self.reducer.num_finished}" if self.reducer is not None else ""

    def description(self) -> str:
        compressed = f" as {self._compressor.name}" if self._compressor else ""
        return (
            f"{compressed} in {len(self._training.buckets)} bucket(s) of up to {self._cap_mb:g} MiB"
        )


@contextmanager
def split_at_buckets(cap_mb: float) -> Iterator[None]:
    """Graphs compiled inside are split at buckets of ``cap_mb`` MiB, which then leave while
    backward runs: that of a compiled graph is one node of autograd, whose gradients all come at its
    end.

    torch's compiler does so for DistributedDataParallel
    (`torch._dynamo.backends.distributed.DDPOptimizer`), where it finds an active module with
    ``bucket_bytes_cap``. ``torch._dynamo.config.optimize_ddp = False`` turns that off. It takes no
    cap below its first bucket's, which is 1 MiB, as here.
    """
    cap = int(max(cap_mb, FIRST_BUCKET_MB) * 2**20)
    active: Any = SimpleNamespace(bucket_bytes_cap=cap)  # all that the compiler reads of one
    DistributedDataParallel._active_ddp_module = active
    try:
        yield
    finally:
        # not what was there before: that may be another thread's
        DistributedDataParallel._active_ddp_module = None


def check_wire(
    caller: str,
    bucket_cap_mb: Any,
    compression: Any,
    *,
    shards: bool = False,
) -> Compressor | None:
    """The compressor of this name, or as it is given.

    Raises:
        ConfigurationError: Gradients cannot travel in such buckets, or so compressed.
    """
    number = type(bucket_cap_mb) in (int, float) and 0 < bucket_cap_mb < math.inf
    if bucket_cap_mb is not None and not number:
        raise ConfigurationError(
            f"{caller} got bucket_cap_mb={bucket_cap_mb!r}, expected a bucket size in MiB greater "
            "than 0, such as 4 or 25, or None for the default."
        )
    compressor = compression
    if isinstance(compression, str) and compression in COMPRESSORS:
        compressor = COMPRESSORS[compression].build()
    if compressor is None:
        return None
    if not isinstance(compressor, Compressor):
        names = ", ".join(map(repr, COMPRESSORS))
        raise ConfigurationError(
            f"{caller} got compression={compression!r}, expected one of None, {names} or a "
            "Compressor."
        )
    if shards and not compressor.can_shard:
        raise ConfigurationError(
            f"{caller} got compression={compression!r}, which cannot leave each rank its shard of "
            "a sum. Use 'bf16', 'int8' or None, or strategy='ring'."
        )
    return compressor
