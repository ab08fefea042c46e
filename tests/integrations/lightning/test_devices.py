"""The device of each rank, with GPUs that are not there."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator

from lightning_ring.errors import RankDiscoveryError
from lightning_ring.integrations.ranks.environment import DeviceRequest, check_request, devices_for
from lightning_ring.job.members import gpu_uuid


class FakeGPUs(CUDAAccelerator):
    visible = 1

    @staticmethod
    def parse_devices(devices):
        return list(range(devices)) if isinstance(devices, int) else devices

    @classmethod
    def auto_device_count(cls):
        return cls.visible


class EightFakeGPUs(FakeGPUs):
    visible = 8


def refuse(num_devices, num_nodes):
    raise RankDiscoveryError(f"devices={num_devices}, num_nodes={num_nodes}")


ENVIRONMENT = SimpleNamespace(local_size=lambda: 4, num_nodes=lambda: 2, validate_settings=refuse)


def test_the_one_visible_gpu_is_every_local_rank_s():
    """``srun --gpus-per-task=1``: four ranks on the node, each of which sees its own GPU as
    number 0.
    """
    assert devices_for(FakeGPUs(), [torch.device("cuda", 0)], 4) == [torch.device("cuda", 0)] * 4


def test_ranks_share_gpus_where_the_user_wants_it(monkeypatch):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert [device.index for device in devices_for(EightFakeGPUs(), None, 10)] == [*range(8), 0, 1]


def test_all_gpus_visible():
    assert [device.index for device in devices_for(EightFakeGPUs(), None, 4)] == [0, 1, 2, 3]
    told = "started 9 ranks on this node, which has 8 EightFakeGPUs"
    with pytest.raises(RankDiscoveryError, match=told):
        devices_for(EightFakeGPUs(), None, 9)


def test_one_device_may_be_written_where_each_rank_sees_one():
    check_request(DeviceRequest(1, 2), ENVIRONMENT, FakeGPUs())
    check_request(DeviceRequest([0], 2), ENVIRONMENT, FakeGPUs())
    for accelerator in (EightFakeGPUs(), CPUAccelerator()):
        with pytest.raises(RankDiscoveryError, match="devices=1, num_nodes=2"):
            check_request(DeviceRequest(1, 2), ENVIRONMENT, accelerator)


def test_a_partition_is_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="whole card")
    )
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    for visible, uuids in (
        ("MIG-1f, MIG-2f", ["MIG-1f", "MIG-2f"]),
        *((visible, ["whole card"] * 2) for visible in ("GPU-7", "3", "")),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [gpu_uuid(device) for device in (first, second)] == uuids
