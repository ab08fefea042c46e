"""What a compressor is: gradients that travel as something shorter than they are."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from lightning_ring.comm.communicator import Communicator, Work
from lightning_ring.gradients.bucket import Bucket


@runtime_checkable
class Compressor(Protocol):
    """Sends buckets of gradients in its own way. Subclass it; what is written here are defaults.

    Every method but `accepts` and `wire_bytes` is called on all ranks, in the same order and in the thread that runs
    backward; so is `Work.wait` of the works it returns, which may start further collectives of ``comm``.

    Attributes:
        name: How messages call it.
        can_shard: Whether it offers `reduce_scatter`, which a sharded optimizer needs.
    """

    name: str = "a compressor"
    can_shard: ClassVar[bool] = False

    def accepts(self, dtype: torch.dtype) -> bool:
        """Whether it sends gradients of ``dtype``; the others travel as they are."""
        return dtype is torch.float32

    def wire_bytes(self, dtype: torch.dtype) -> int | None:
        """What an element takes on the wire, if that is all there is to it: ``bucket_cap_mb="auto"`` needs to know."""
        return None

    def prepare(self, bucket: Bucket) -> None:
        """``bucket`` was just built. Buckets are built again when their order of travel or their sizes change."""

    def begin_backward(self) -> None:
        """A backward whose gradients will be sent begins."""

    @abstractmethod
    def all_reduce(self, bucket: Bucket, comm: Communicator, *, divisor: int, name: str) -> Work:
        """Start to replace ``bucket.flat`` by the sum over ranks of ``bucket.wire.flat``, divided by ``divisor``.

        All ranks end with the same bits. The flags in the bucket's tail (`Bucket.used`, `Bucket.stop`) are 0 or 1 on
        each rank; afterwards they are positive where any rank had a 1, else 0.
        """
        ...

    def reduce_scatter(self, bucket: Bucket, comm: Communicator, *, divisor: int, name: str) -> Work:
        """The same, but only for the shard ``comm.shard_index`` of ``bucket.flat``; the rest of it is scratch.

        The shard gets the bits that `all_reduce` would give it.
        """
        raise NotImplementedError(f"{self.name} cannot reduce to shards")

    def state_dict(self, comm: Communicator) -> dict[str, Any]:
        """What a checkpoint needs, of all ranks; collective. Empty if nothing is kept from step to step."""
        return {}

    def load_state_dict(self, state: dict[str, Any], rank: int, world_size: int) -> str | None:
        """Go on from `state_dict`. Returns what the user should know if that was not possible."""
        return None
