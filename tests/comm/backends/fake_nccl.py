"""NCCL without a GPU: CPU tensors of thread-ranks, NCCL's arithmetic, and a record of what torch
was asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ring.comm.backends import nccl
from lightning_ring.comm.backends.nccl import NCCLCommunicator
from lightning_ring.comm.communicator import Communicator, shard

_REDUCE = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.PRODUCT: torch.mul,
}


class FakeGroup:
    """One rank's NCCL process group over ``comm``, a communicator between threads.

    Attributes:
        calls: The collectives so far, as (kind, operation), and what ended the group.
        late: Until it is set, collectives are on the stream and not over.
        registered: What it allocates, if anything.
        connected: Whether NCCL has started, as by ``device_id`` or by the first collective.
    """

    def __init__(self, comm: Communicator, connected: bool = True) -> None:
        self.comm = comm
        self.connected = connected
        self.calls: list[tuple[str, Any]] = []
        self.late: threading.Event | None = None
        self.registered: Tensor | None = None

    def _get_backend(self, device: torch.device) -> FakeGroup:
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return self.registered is not None

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        if not self.connected:
            raise RuntimeError(
                "NCCL communicator has not been initialized before mem pool creation"
            )
        return self.registered

    def abort(self) -> None:
        """Ends the kernels on the stream, and with them every wait inside the driver."""
        self.calls.append(("abort", None))
        if self.late is not None:
            self.late.set()

    def reduce(self, tensor: Tensor, op: Any) -> Tensor:
        """NCCL's sums are in the tensor's type, rank by rank. So is the factor that AVG
        multiplies with first.
        """
        rows = self.comm.all_gather(tensor)
        if op == dist.ReduceOp.AVG:
            factor = torch.tensor(1 / self.comm.world_size).to(tensor.dtype)
            rows, op = [row * factor for row in rows], dist.ReduceOp.SUM
        total = rows[0]
        for row in rows[1:]:
            total = _REDUCE[op](total, row)
        return total


class FakeDistributed:
    """In place of the module `torch.distributed` in the NCCL backend."""

    ReduceOp = dist.ReduceOp
    ProcessGroup = dist.ProcessGroup

    def all_reduce(self, tensor: Tensor, *, op: Any, group: FakeGroup, async_op: bool) -> FakeWork:
        group.calls.append(("all_reduce", op))
        tensor.copy_(group.reduce(tensor, op))
        return FakeWork(group.late)

    def reduce_scatter_tensor(
        self, output: Tensor, sent: Tensor, *, op: Any, group: Any, async_op: bool
    ) -> FakeWork:
        group.calls.append(("reduce_scatter", op))
        output.copy_(shard(group.reduce(sent, op), group.comm.world_size, group.comm.rank))
        return FakeWork(group.late)

    def all_gather_into_tensor(
        self, output: Tensor, sent: Tensor, *, group: FakeGroup, async_op: bool
    ) -> FakeWork:
        group.calls.append(("all_gather", None))
        output.copy_(torch.cat(group.comm.all_gather(sent)))
        return FakeWork(group.late)

    def is_initialized(self) -> bool:
        return True

    def destroy_process_group(self, group: FakeGroup) -> None:
        if group.late is not None:
            assert group.late.wait(10), "destroying a group waits for its kernels"
        group.calls.append(("destroy", None))


class FakeWork:
    """Waiting for it orders streams, and so returns at once."""

    def __init__(self, late: threading.Event | None = None) -> None:
        self._late = late

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return self._late is None or self._late.is_set()


class CPUTensorsOverNCCL(NCCLCommunicator):
    """The NCCL backend, which takes CPU tensors for its own."""

    def _serves(self, tensor: Tensor) -> bool:
        return True


def over_fake_nccl(monkeypatch: pytest.MonkeyPatch) -> Callable[..., NCCLCommunicator]:
    """Have the NCCL backend call fakes; returns what makes a thread-rank's communicator of such
    a group.
    """
    monkeypatch.setattr(nccl, "dist", FakeDistributed())
    monkeypatch.setattr(
        nccl, "_abort_process_group", lambda group: group.calls.append(("abort", None))
    )
    return lambda host, **options: CPUTensorsOverNCCL(
        FakeGroup(host), host, host._policy, **options
    )  # type: ignore[arg-type]
