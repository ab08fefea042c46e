"""What happens to the others when a rank dies, over Gloo without any launcher; and NCCL, where
there is a GPU.
"""

import subprocess
import time

import pytest
import torch

from lightning_ring.comm.backends.gloo import open_torch_communicator
from lightning_ring.job.rendezvous.greeting import reserve_port
from tests import forked
from tests.gpu import on_gpu
from tests.processes import clean_env, end_session
from tests.refusals import refused

RANK = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from lightning_ring.comm.backends.gloo import open_torch_communicator
from lightning_ring.comm.waiting import WaitPolicy
from lightning_ring.errors import PeerFailedError, RingError
rank, port, watched = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "watched"
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
begin = time.monotonic()
def check():  # a job-watch that learns of the death later than Gloo does
    if watched and time.monotonic() > begin + 0.8:
        raise PeerFailedError("rank 1 was killed by signal 9")
comm = open_torch_communicator("gloo", WaitPolicy(timedelta(seconds=60), check))
comm.all_reduce_(torch.ones(100_000)).wait()
begin = time.monotonic()
if rank == 1:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    comm.all_reduce_(torch.ones(100_000), name="bucket 4").wait()
except RingError as error:
    print(f"{type(error).__name__} after {time.monotonic() - begin:.1f} s: {error}", flush=True)
    os._exit(7)
"""


def run_ranks_of(code, world_size, argument, **env):
    """Exit code and output of ``world_size`` plain processes that run ``code`` with rank, port
    and ``argument``.
    """
    reserved, python = reserve_port(), forked.python()
    port = str(reserved.getsockname()[1])
    processes = [
        subprocess.Popen(
            [*python, "-c", code, str(rank), port, argument],
            env=clean_env(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(world_size)
    ]
    try:
        until = time.monotonic() + 150
        outputs = [
            process.communicate(timeout=max(1.0, until - time.monotonic()))[0]
            for process in processes
        ]
    finally:
        for process in processes:
            end_session(process)
            process.wait(60)
        reserved.close()
    return [
        (process.returncode, output) for process, output in zip(processes, outputs, strict=True)
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("watched", ["watched", "alone"])
def test_a_killed_rank_ends_the_others_waits(watched):
    results = run_ranks_of(RANK, 3, watched)
    assert results[1][0] == -9
    for code, output in (results[0], results[2]):
        assert code == 7, output
        if watched == "watched":
            assert "PeerFailedError" in output
            assert "rank 1 was killed by signal 9" in output
        else:
            assert 'all_reduce "bucket 4"' in output


def test_without_a_default_group():
    with refused("init_process_group"):
        open_torch_communicator("gloo")


NCCL_RANK = """
import sys
import torch, torch.distributed as dist
from lightning_ring.comm.communicator import ReduceOp, shard
from lightning_ring.comm.backends.gloo import open_torch_communicator
from lightning_ring.comm.waiting import WaitPolicy
from tests.checks.reductions import allowed, plain, tolerance, values
rank, port, world_size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.cuda.set_device(rank % torch.cuda.device_count())
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
comm = open_torch_communicator("nccl")
for dtype, op in allowed():
    if dtype is torch.int16 or (dtype.is_complex and op is ReduceOp.PRODUCT):
        continue  # NCCL has no such reduction
    for numel in (0, 7, 5003, 6000):
        inputs = values(numel, dtype, world_size)
        expected = plain(inputs, op)
        whole, halves = inputs[rank].cuda(), inputs[rank].cuda()
        comm.all_reduce_(whole, op=op).wait()
        torch.testing.assert_close(whole.cpu(), expected, **tolerance(dtype))
        comm.reduce_scatter_(halves, op=op).wait()
        own = shard(halves, world_size, rank).cpu()
        torch.testing.assert_close(own, shard(expected, world_size, rank), **tolerance(dtype))
        comm.all_gather_(halves).wait()
        torch.testing.assert_close(halves.cpu(), expected, **tolerance(dtype))
mine = torch.full((3,), rank, device="cuda")
assert [int(row[0]) for row in comm.all_gather(mine)] == list(range(world_size))
comm.broadcast_(mine, src=world_size - 1).wait()
assert mine.tolist() == [world_size - 1] * 3
sent = [torch.full((rank + 2 * peer,), rank, device="cuda") for peer in range(world_size)]
received = [torch.empty(peer + 2 * rank, dtype=torch.int64, device="cuda") for peer in range(world_size)]
comm.all_to_all(sent, received).wait()
assert all((received[peer] == peer).all() for peer in range(world_size))
on_cpu = torch.ones(5)
comm.all_reduce_(on_cpu).wait()
assert on_cpu[0] == world_size
assert comm.broadcast_object({"rank": rank}, src=world_size - 1) == {"rank": world_size - 1}
comm.close()
comm.close()
"""


@on_gpu
@pytest.mark.parametrize("alone", [True, False])
def test_every_collective_over_nccl(alone):
    gpus = torch.cuda.device_count()
    world_size = 1 if alone else max(2, min(4, gpus))
    extra = {}
    if world_size > gpus:
        if torch.cuda.nccl.version() < (2, 30):
            pytest.skip("one GPU, which NCCL before 2.30 gives to one rank only")
        extra["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    for code, output in run_ranks_of(NCCL_RANK, world_size, str(world_size), **extra):
        assert code == 0, output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        with refused("backend='nccl' needs CUDA GPUs"):
            open_torch_communicator("nccl")
        with refused("'gloo', 'nccl' or 'xccl'"):
            open_torch_communicator("ucc")
    finally:
        torch.distributed.destroy_process_group()
