"""GPUs of three vendors, by torch's modules; none of them need be there."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from lightning_ring.host import accelerator
from lightning_ring.host.random_state import _random_state
from lightning_ring.job.communicators import _chosen
from lightning_ring.job.ranks import RankInfo
from lightning_ring.tools.bench.session import choose_device
from lightning_ring.tools.doctor import torch_facts


@pytest.fixture
def intel(monkeypatch):
    """As if this machine had two GPUs of ``torch.xpu``."""
    modules = {"xpu": MagicMock(), "cuda": MagicMock()}
    for module, count in zip(modules.values(), (2, 0), strict=True):
        module.device_count.return_value = count
        module.is_available.return_value = module.is_initialized.return_value = count > 0
    properties = SimpleNamespace(name="Max 1550", total_memory=64 << 30)
    modules["xpu"].get_device_properties.return_value = properties
    monkeypatch.setattr(torch, "get_device_module", lambda device: modules[device.type])


def test_each_kind_has_its_library():
    info = RankInfo(0, 2, 0, 2, 0, 1, "torchrun")
    kinds = ("cuda", "xpu", "cpu")
    chosen = [_chosen("auto", info, torch.device(kind)) for kind in kinds]
    assert chosen == ["nccl", "xccl", "shared memory"]
    gpus = [kind for kind in (*kinds, "mps") if accelerator.is_gpu(torch.device(kind))]
    assert gpus == ["cuda", "xpu"]


def test_the_modules_of_torch_have_the_same_names():
    names = """Event Stream current_stream stream synchronize memory_allocated memory_reserved
        max_memory_allocated get_device_name get_device_properties device_count is_available
        is_initialized init set_device get_rng_state_all set_rng_state"""
    for kind in accelerator.COLLECTIVES:
        module = accelerator.gpu_module(torch.device(kind))
        assert [name for name in names.split() if not hasattr(module, name)] == []


@pytest.mark.usefixtures("intel")
def test_the_bench_and_the_doctor_find_gpus_of_any_kind(monkeypatch):
    info = RankInfo(1, 2, 1, 2, 0, 1, "torchrun")
    for asked in ("auto", "gpu", "xpu"):
        assert choose_device(asked, info) == torch.device("xpu", 1)
    assert accelerator.COLLECTIVES.keys() & _random_state().keys() == {"xpu"}
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
