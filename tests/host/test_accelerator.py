"""GPUs of three vendors, by torch's modules; none of them need be there."""

from types import SimpleNamespace

import pytest
import torch

from lightning_ring.host import accelerator
from lightning_ring.job.communicators import _chosen
from lightning_ring.job.ranks import RankInfo
from lightning_ring.tools.bench.session import choose_device
from lightning_ring.tools.doctor import torch_facts


class FakeModule(SimpleNamespace):
    """``torch.xpu`` of a machine with two GPUs."""

    def __init__(self):
        super().__init__(
            device_count=lambda: 2,
            is_available=lambda: True,
            is_initialized=lambda: True,
            init=lambda: None,
            set_device=lambda index: None,
            get_device_properties=lambda index: SimpleNamespace(
                name="Max 1550", total_memory=64 << 30
            ),
        )


@pytest.fixture
def intel(monkeypatch):
    module = FakeModule()
    none = SimpleNamespace(
        device_count=lambda: 0, is_available=lambda: False, is_initialized=lambda: False
    )
    monkeypatch.setattr(
        torch, "get_device_module", lambda device: module if device.type == "xpu" else none
    )
    return module


def test_each_kind_has_its_library():
    info = RankInfo(0, 2, 0, 2, 0, 1, "torchrun")
    kinds = ("cuda", "xpu", "cpu")
    assert [_chosen("auto", info, torch.device(kind)) for kind in kinds] == [
        "nccl",
        "xccl",
        "shared memory",
    ]
    assert [accelerator.is_gpu(torch.device(kind)) for kind in (*kinds, "mps")] == [
        True,
        True,
        False,
        False,
    ]


def test_the_modules_of_torch_have_the_same_names():
    names = (
        "Event Stream current_stream stream synchronize memory_allocated memory_reserved "
        "max_memory_allocated"
    )
    names += (
        " get_device_name get_device_properties device_count is_available is_initialized init "
        "set_device"
    )
    names += " get_rng_state_all set_rng_state"
    for kind in accelerator.COLLECTIVES:
        module = accelerator.gpu_module(torch.device(kind))
        assert [name for name in names.split() if not hasattr(module, name)] == []


def test_the_bench_and_the_doctor_find_gpus_of_any_kind(intel, monkeypatch):
    info = RankInfo(1, 2, 1, 2, 0, 1, "torchrun")
    for asked in ("auto", "gpu", "xpu"):
        assert choose_device(asked, info) == torch.device("xpu", 1)
    assert [kind for kind, _ in accelerator.started_gpus()] == ["xpu"]
    monkeypatch.setattr(torch_facts, "_compute", lambda device: None)
    found = torch_facts._gpus()
    assert [gpu["name"] for gpu in found] == ["Intel Max 1550"] * 2


@pytest.mark.parametrize(("hip", "expected"), [(None, "NVIDIA"), ("6.4", "AMD")])
def test_amd_is_told_by_what_torch_was_built_for(hip, expected, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    assert accelerator.vendor("cuda") == expected
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 22, 3))
    monkeypatch.setattr(torch_facts.dist, "is_nccl_available", lambda: True)
    assert torch_facts._collectives() == f"{'RCCL' if hip else 'NCCL'} 2.22.3"
