"""Collectives of `lightning_ring.horovod`: order, kinds of tensors, errors."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI

import lightning_ring.horovod as hvd

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
torch.set_num_threads(1)


def check_names_may_come_in_another_order_on_each_rank() -> None:
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (RANK, SIZE)
    names = [f"tensor {number}" for number in range(40)]
    for _ in range(3):  # the second time names travel as numbers
        order = names if RANK == 0 else names[::-1]
        handles = {
            name: hvd.allreduce_async(torch.full((3,), float(names.index(name))), name=name)
            for name in order
        }
        for name in names:
            assert hvd.synchronize(handles[name]).tolist() == [float(names.index(name))] * 3


def check_a_steady_step_is_told_by_one_short_message() -> None:
    hvd.init()
    comm = hvd.global_process_set.negotiation.comm
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for method in ("all_reduce_", "all_gather_object"):
            real = getattr(comm, method)
            patch.setattr(
                comm, method, lambda *a, _m=method, _r=real, **k: (calls.append(_m), _r(*a, **k))[1]
            )
        for step in range(4):
            hvd.barrier()
            calls.clear()
            handles = [
                hvd.allreduce_async_(torch.full((3,), 1.0), name=f"steady {i}", op=hvd.Sum)
                for i in range(20)
            ]
            assert all(hvd.synchronize(handle).tolist() == [SIZE] * 3 for handle in handles)
            assert ("all_gather_object" in calls) == (step == 0)
        # 2, if the thread did not begin a cycle in the middle of the step
        assert calls.count("all_reduce_") <= 6


def check_tensors_that_change_from_step_to_step() -> None:
    hvd.init()
    for step in range(6):
        numel = 1 + step // 2
        rows = 1 + (step + RANK) % 3  # other sizes on each rank, at each step
        gathered = hvd.allgather_async(torch.full((rows, 2), float(RANK)), name="rows")
        whole = hvd.allreduce_async(
            torch.ones(numel, dtype=torch.float64), name="numel", op=hvd.Sum
        )
        group = hvd.grouped_allreduce_async(
            [torch.ones(2), torch.ones(numel)], name="group", op=hvd.Max
        )
        assert hvd.synchronize(gathered).shape[0] == sum(
            1 + (step + rank) % 3 for rank in range(SIZE)
        )
        assert hvd.synchronize(whole).tolist() == [SIZE] * numel
        assert [part.tolist() for part in hvd.synchronize(group)] == [[1.0] * 2, [1.0] * numel]
    for _ in range(2):
        with pytest.raises(
            hvd.HorovodInternalError, match="submitted it with different numbers of tensors"
        ):
            hvd.grouped_allreduce([torch.ones(1)] * (2 + RANK), name="group of other sizes")
        assert (
            hvd.grouped_allreduce([torch.ones(1)] * 3, name="group", op=hvd.Sum)[2].item() == SIZE
        )


def check_tensors_of_all_kinds() -> None:
    hvd.init()
    for _ in range(3):  # told by name, then by number
        leaf = torch.full((2, 3), 1.0, requires_grad=True)
        transposed, nothing = torch.arange(6.0).view(2, 3).t(), torch.empty(0, 4)
        large = torch.ones(400_000)
        with torch.inference_mode():
            inferred = torch.ones(2)
            handles = [hvd.allreduce_async_(inferred, name="inferred", op=hvd.Sum)]
        named = {"leaf": leaf, "transposed": transposed, "nothing": nothing, "large": large}
        handles += [
            hvd.allreduce_async_(tensor, name=name, op=hvd.Sum) for name, tensor in named.items()
        ]
        with torch.device("meta"):  # a mode of the thread that waits
            results = [hvd.synchronize(handle) for handle in handles]
        assert [
            result is tensor
            for result, tensor in zip(results, [inferred, *named.values()], strict=True)
        ] == [True] * 5
        assert inferred.tolist() == [SIZE] * 2
        assert leaf.tolist() == [[SIZE] * 3] * 2
        assert leaf.requires_grad
        assert torch.equal(transposed, torch.arange(6.0).view(2, 3).t() * SIZE)
        assert nothing.shape == (0, 4)
        assert large.eq(SIZE).all()
        assert not hvd.allreduce(torch.ones(2), name="new memory").is_inference()
    with pytest.raises(ValueError, match="expanded tensor cannot be written in place"):
        hvd.allreduce_(torch.ones(1).expand(3))


def check_threads_wait_for_collectives_of_their_own() -> None:
    hvd.init()
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(30):
                assert (
                    hvd.allreduce(torch.ones(5), name=f"thread {number}", op=hvd.Sum).tolist()
                    == [SIZE] * 5
                )
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert not any(thread.is_alive() for thread in threads)
    handle = hvd.allreduce_async(torch.ones(1), name="nobody waits", op=hvd.Sum)
    until = time.monotonic() + 60
    while not hvd.poll(handle):
        assert time.monotonic() < until
    assert hvd.synchronize(handle).item() == SIZE


def check_collectives_of_other_sizes_on_each_rank() -> None:
    hvd.init()
    rows = torch.full((RANK + 1, 2), RANK)
    assert hvd.allgather(rows).tolist() == [
        [rank] * 2 for rank in range(SIZE) for _ in range(rank + 1)
    ]
    sent = torch.arange(SIZE * (RANK + 1)).float()
    got, received = hvd.alltoall(sent, torch.tensor([RANK + 1] * SIZE, dtype=torch.int32))
    assert received.tolist() == [rank + 1 for rank in range(SIZE)]
    assert got.tolist() == [
        float(RANK * (rank + 1) + i) for rank in range(SIZE) for i in range(rank + 1)
    ]
    scattered = hvd.reducescatter(torch.arange(2 * SIZE + 1).float(), op=hvd.Sum)
    assert scattered.tolist() == [
        x * SIZE for x in torch.arange(2 * SIZE + 1).tensor_split(SIZE)[RANK].tolist()
    ]
    assert hvd.broadcast_object({"from": RANK}, root_rank=SIZE - 1) == {"from": SIZE - 1}
    assert hvd.broadcast_object([RANK] if RANK == 0 else None) == [0]
    assert hvd.allgather_object("" if RANK else None) == [None, *[""] * (SIZE - 1)]
    assert hvd.allgather_object("x" * RANK) == ["x" * rank for rank in range(SIZE)]
    in_place = torch.tensor([RANK + 1])
    hvd.allreduce_(in_place, op=hvd.Max)
    assert in_place.item() == SIZE
    one, other = hvd.grouped_allreduce([torch.ones(2), torch.full((3,), float(RANK))], op=hvd.Sum)
    assert one.tolist() == [SIZE] * 2
    assert other.tolist() == [sum(range(SIZE))] * 3


def check_gradients_pass_through_collectives() -> None:
    hvd.init()
    weight = torch.full((2,), 1.0, requires_grad=True)
    (hvd.allreduce(weight * (RANK + 1), op=hvd.Sum).sum() * (RANK + 1)).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [sum(range(1, SIZE + 1)) * (RANK + 1.0)] * 2


def check_what_does_not_fit_is_an_error_on_every_rank() -> None:
    hvd.init()
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: hvd.allreduce(torch.zeros(RANK + 1), name="a"), "allreduce.a: .*different shapes"),
        (
            lambda: hvd.allreduce(torch.zeros(2, dtype=[torch.float32, torch.int32][RANK % 2])),
            "different data types",
        ),
        (lambda: hvd.broadcast(torch.zeros(1), RANK), "different root ranks: rank 0 0, rank 1 1"),
        (
            lambda: hvd.allreduce(torch.zeros(1), op=[hvd.Sum, hvd.Max][RANK % 2]),
            "different reduce operations",
        ),
        (
            lambda: hvd.allgather(torch.zeros(2, RANK + 1)),
            "different shapes beyond the first dimension",
        ),
    ]
    for call, message in cases:
        with pytest.raises(hvd.HorovodInternalError, match=message) as caught:
            call()
        assert len(set(MPI.COMM_WORLD.allgather(str(caught.value)))) == 1
    # a collective that the other ranks hold back, so that it is pending where it is asked again
    if RANK != 0:
        MPI.COMM_WORLD.Barrier()
    handle = hvd.allreduce_async(torch.zeros(1), name="twice")
    if RANK == 0:
        with pytest.raises(
            ValueError, match=r"allreduce\.twice: a collective of this name was submitted"
        ):
            hvd.allreduce_async(torch.zeros(1), name="twice")
        MPI.COMM_WORLD.Barrier()
    hvd.synchronize(handle)
    assert hvd.synchronize(handle) is None  # as Horovod
    with pytest.raises(ValueError, match="was not created here, or was synchronized before"):
        hvd.poll(handle)
    with pytest.raises(ValueError, match="a grouped allreduce got no tensors"):
        hvd.grouped_allreduce_async([])
    with pytest.raises(
        ValueError, match=r"op=Adasum got a tensor of torch.int32, expected floating point"
    ):
        hvd.allreduce(torch.zeros(1, dtype=torch.int32), op=hvd.Adasum)


def check_join_adds_zeros_until_all_have_joined() -> None:
    hvd.init()
    last = SIZE - 1
    for step in range(3 if last == RANK else 1):
        found = hvd.allreduce(torch.ones(2), name=f"step {step}", op=hvd.Sum)
        assert found.tolist() == [SIZE if step == 0 else 1] * 2
    if last == RANK:
        # a call without a name, on this rank alone
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 1
    assert hvd.join() == last
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == SIZE
    for _ in range(2):  # names that are known, one of them pending where this rank joins
        hvd.allreduce(torch.ones(2), name="known", op=hvd.Sum)
        hvd.allgather(torch.ones(1), name="known rows")
        assert hvd.allreduce(torch.ones(1), name="pending", op=hvd.Sum).item() == SIZE
        if last == RANK:
            assert hvd.allreduce(torch.ones(2), name="known", op=hvd.Sum).tolist() == [1, 1]
            with pytest.raises(
                hvd.HorovodInternalError, match=r"allgather needs every rank, and rank\(s\) 0"
            ):
                hvd.allgather(torch.ones(1), name="known rows")
        handle = (
            hvd.allreduce_async(torch.ones(1), name="pending", op=hvd.Sum) if last != RANK else None
        )
        hvd.join()
        assert handle is None or hvd.synchronize(handle).item() == SIZE - 1


def check_process_sets_communicate_by_themselves() -> None:
    hvd.init()
    alone = [hvd.add_process_set([rank]) for rank in range(SIZE)]
    whole = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=alone[RANK])
    assert whole.item() == 1
    with pytest.raises(ValueError, match="does not contain this rank"):
        hvd.allreduce(torch.ones(1), process_set=alone[(RANK + 1) % SIZE])
    with pytest.raises(ValueError, match=r"of ranks \[0\] is there already"):
        hvd.add_process_set([0])
    with pytest.raises(
        ValueError, match=r"asked for different process sets: rank 0 \[0, 1\], rank 1 \[1\]"
    ):
        hvd.add_process_set([[0, 1], [1]][min(RANK, 1)])
    if RANK == 0:
        # a call without a name, which others do not make
        hvd.allreduce(torch.ones(1), process_set=alone[0])
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == SIZE
    assert all(hvd.remove_process_set(one) for one in alone)
    assert not hvd.remove_process_set(hvd.global_process_set)


def check_the_timeline_has_rows_of_names(tmp_path: Path) -> None:
    hvd.init()
    path = tmp_path / "timeline.json"
    hvd.start_timeline(str(path), mark_cycles=True)
    hvd.allreduce(torch.ones(3), name="gradient")
    hvd.stop_timeline()
    if RANK == 0:
        events = json.loads(path.read_text())["traceEvents"]
        rows = {
            event["tid"]: event["args"]["name"]
            for event in events
            if event["name"] == "thread_name"
        }
        named = [(rows[event["tid"]], event["name"]) for event in events if event["ph"] == "X"]
        assert [what for row, what in named if row == "allreduce.gradient"] == [
            "NEGOTIATE_ALLREDUCE",
            "ALLREDUCE",
        ]
        assert ("cycles", "CYCLE_START") in named
