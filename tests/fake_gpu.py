"""A GPU without one: tensors that have a device and no values, and errors for what would make the
host wait.
"""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from lightning_ring.algorithms.sharded import parameters, reads
from lightning_ring.comm import communicator
from lightning_ring.comm.backends import nccl
from lightning_ring.comm.backends.nccl import NCCLCommunicator
from lightning_ring.gradients import bucket, memory, sharded_gradient
from lightning_ring.gradients.compression import blocks

aten = torch.ops.aten
# their results' sizes or values are known to the host once the device has computed them
_READS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten._unique2,
    aten.unique_consecutive,
    aten.bincount,
    aten.repeat_interleave,
}
_COPIES = {aten._to_copy, aten.copy_, aten._foreach_copy_}
_INDEXING = {aten.index, aten.index_put, aten.index_put_}


class HostWaits(AssertionError):
    """The host would wait for the device."""


class NoHostWaits(TorchDispatchMode):
    """An error for each operation that makes the host wait for a CUDA device."""

    def __init__(self):
        super().__init__()
        # by their storage; kept, so that no other storage gets the address
        self._pinned = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet is aten.is_pinned:
            return self._is_pinned(args[0])
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
        if on_gpu and packet in _READS:
            raise HostWaits(f"{func} of a tensor on the GPU")
        if packet in _INDEXING and args[0].is_cuda:
            for index in args[1]:
                if index is not None and (index.is_cpu or index.dtype in (torch.bool, torch.uint8)):
                    raise HostWaits(f"{func} by {index.dtype} on {index.device}")
        on_both = 0 < len(on_gpu) < len(tensors) and packet not in _COPIES
        # elementwise kernels take a number on the CPU as an argument; others copy it
        if on_both and (packet is aten.where or torch.Tag.pointwise not in func.tags):
            raise HostWaits(f"{func} with a tensor on the CPU")
        if packet is aten._to_copy:
            target = torch.device(kwargs.get("device") or args[0].device)
            self._check_copy(func, args[0], target, kwargs.get("non_blocking", False))
        elif packet is aten.copy_:
            self._check_copy(func, args[1], args[0].device, _non_blocking(args, kwargs))
        elif packet is aten._foreach_copy_:
            for target, source in zip(args[0], args[1], strict=True):
                self._check_copy(func, source, target.device, _non_blocking(args, kwargs))
        made = func(*args, **kwargs)
        return self._pin(made) if kwargs.get("pin_memory") else made

    def _pin(self, tensor):
        self._pinned[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def _is_pinned(self, tensor):
        return tensor.untyped_storage()._cdata in self._pinned

    def _check_copy(self, func, source, target, non_blocking):
        if source.device.type == target.type:
            return
        if not non_blocking:
            raise HostWaits(f"{func} from {source.device} to {target} without non_blocking")
        if source.is_cpu and not self._is_pinned(source):
            raise HostWaits(f"{func} from pageable memory to {target}")


def _non_blocking(args, kwargs):
    return args[2] if len(args) > 2 else kwargs.get("non_blocking", False)


class FakeGPUCommunicator(NCCLCommunicator):
    """Rank 0 of two, whose peer has the same. Collectives touch nothing."""

    def all_gather_object(self, obj, *, name=""):
        self._check_objects(name)
        return [obj, obj]

    def broadcast_object(self, obj, *, src=0, name=""):
        self._check_objects(name)
        return obj

    def _check_objects(self, name):
        if isinstance(_get_current_dispatch_mode(), NoHostWaits):
            raise HostWaits(f"ranks exchange objects: {name}")

    def read(self, tensor):
        raise HostWaits("a read of a tensor")


class _Distributed(SimpleNamespace):
    """In place of `torch.distributed`: collectives that touch nothing."""

    def __getattr__(self, name):
        work = SimpleNamespace(wait=lambda: True, is_completed=lambda: True)
        return lambda *args, **kwargs: work


class _Copy:
    """Of a number that the device has computed by the second time it is asked for."""

    immediate = False

    def __init__(self, tensor):
        tensor.to("cpu", non_blocking=True)
        self._asked = 0

    def ready(self):
        self._asked += 1
        return self._asked > 1

    def value(self):
        return _Zero()


class _Zero(float):
    def isfinite(self):
        return True


def _sharded_gradient(cls, part, contents):
    """A subclass of a tensor without values."""
    gradient = Tensor._make_wrapper_subclass(
        cls, part.size, part.strides, dtype=contents.average.dtype, device="cuda:0"
    )
    gradient.part, gradient.contents = part, contents
    return gradient


@contextmanager
def fake_gpu(monkeypatch):
    """Tensors made inside have no values, and may be on ``"cuda"``. Yields what makes a
    communicator.
    """
    memory_of = {}  # by storage: an address, and what keeps it

    def address(tensor):
        storage = tensor.untyped_storage()._cdata
        start, _ = memory_of.setdefault(storage, ((len(memory_of) + 1) << 32, tensor.detach()))
        return start + tensor.storage_offset() * tensor.element_size()

    def from_dlpack(flat):
        alias = torch.empty_like(flat)
        memory_of[alias.untyped_storage()._cdata] = (address(flat), alias.detach())
        return alias

    def pin_memory(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)  # which such tensors lack
    monkeypatch.setattr(torch, "from_dlpack", from_dlpack)
    monkeypatch.setattr(Tensor, "data_ptr", address)
    monkeypatch.setattr(bucket, "make_unreadable", lambda *_: None)
    # the fake of tensors is a mode, too
    monkeypatch.setattr(parameters, "_disable_current_modes", nullcontext)
    for module in (memory, parameters, reads):
        monkeypatch.setattr(module, "current_stream", lambda device: None)
    for module in (sharded_gradient, parameters):
        monkeypatch.setattr(module, "unreadable_like", lambda like, _: torch.empty_like(like))
    monkeypatch.setattr(sharded_gradient.ShardedGradient, "__new__", _sharded_gradient)
    monkeypatch.setattr(blocks, "triton_kernels", lambda values: None)
    monkeypatch.setattr(communicator, "HostCopy", lambda tensor, wait_until: _Copy(tensor))
    monkeypatch.setattr(nccl, "dist", _Distributed(ReduceOp=nccl.dist.ReduceOp))
    host = SimpleNamespace(rank=0, world_size=2)
    group = SimpleNamespace(_get_backend=lambda device: None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield lambda: FakeGPUCommunicator(group, host)
