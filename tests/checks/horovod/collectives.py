"""Collectives of `lightning_ring.horovod`: order, kinds of tensors, errors."""

import json
import threading

import pytest
import torch

import lightning_ring.horovod as hvd
from tests.checks.horovod.world import RANK, SIZE, WORLD, total
from tests.checks.world import raised_by_all
from tests.processes import wait_for


def check_names_may_come_in_another_order_on_each_rank():
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (RANK, SIZE)
    tensors = {f"tensor {number}": torch.full((3,), float(number)) for number in range(40)}
    for _ in range(3):  # the second time names travel as numbers
        order = list(tensors) if RANK == 0 else list(tensors)[::-1]
        handles = {name: hvd.allreduce_async(tensors[name], name=name) for name in order}
        for name, tensor in tensors.items():
            assert torch.equal(hvd.synchronize(handles[name]), tensor)


def check_a_steady_step_is_told_by_one_short_message():
    hvd.init()
    comm = hvd.global_process_set.negotiation.comm
    calls = []

    def recorded(method):
        real = getattr(comm, method)
        return lambda *args, **kwargs: (calls.append(method), real(*args, **kwargs))[1]

    with pytest.MonkeyPatch.context() as patch:
        for method in ("all_reduce_", "all_gather_object"):
            patch.setattr(comm, method, recorded(method))
        for step in range(4):
            hvd.barrier()
            calls.clear()
            names = [f"steady {number}" for number in range(20)]
            handles = [hvd.allreduce_async_(torch.ones(3), name=name, op=hvd.Sum) for name in names]
            assert all(hvd.synchronize(handle).eq(SIZE).all() for handle in handles)
            assert ("all_gather_object" in calls) == (step == 0)
        # 2, if the thread did not begin a cycle in the middle of the step
        assert calls.count("all_reduce_") <= 6


def check_tensors_that_change_from_step_to_step():
    hvd.init()
    for step in range(6):
        numel = 1 + step // 2
        rows = [1 + (step + rank) % 3 for rank in range(SIZE)]
        gathered = hvd.allgather_async(torch.ones(rows[RANK], 2), name="rows")
        whole = hvd.allreduce_async(torch.ones(numel).double(), name="numel", op=hvd.Sum)
        pair = [torch.ones(2), torch.ones(numel, dtype=torch.int32)]
        group = hvd.grouped_allreduce_async(pair, name="group", op=hvd.Sum)
        assert hvd.synchronize(gathered).shape[0] == sum(rows)
        assert hvd.synchronize(whole).tolist() == [SIZE] * numel
        found = hvd.synchronize(group)
        assert [part.tolist() for part in found] == [[SIZE] * 2, [SIZE] * numel]
        assert found[1].dtype == torch.int32
    for _ in range(2):
        with pytest.raises(hvd.HorovodInternalError, match="with different numbers of tensors"):
            hvd.grouped_allreduce([torch.ones(1)] * (2 + RANK), name="group of other sizes")
        group = hvd.grouped_allreduce([torch.ones(1)] * 3, name="group", op=hvd.Sum)
        assert group[2].item() == SIZE


def check_tensors_of_all_kinds():
    hvd.init()
    for _ in range(3):  # told by name, then by number
        with torch.inference_mode():
            inferred = torch.ones(2)
        named = {
            "inferred": inferred,
            "leaf": torch.full((2, 3), 1.0, requires_grad=True),
            "transposed": torch.arange(6.0).view(2, 3).t(),
            "nothing": torch.empty(0, 4),
            "large": torch.ones(400_000),
        }
        expected = {name: tensor.detach() * SIZE for name, tensor in named.items()}
        with torch.inference_mode():
            handles = [hvd.allreduce_async_(inferred, name="inferred", op=hvd.Sum)]
        for name in list(named)[1:]:
            handles.append(hvd.allreduce_async_(named[name], name=name, op=hvd.Sum))
        with torch.device("meta"):  # a mode of the thread that waits
            results = [hvd.synchronize(handle) for handle in handles]
        for result, (name, tensor) in zip(results, named.items(), strict=True):
            assert result is tensor
            assert torch.equal(tensor, expected[name])
        assert named["leaf"].requires_grad
        assert not hvd.allreduce(torch.ones(2), name="new memory").is_inference()
    with pytest.raises(ValueError, match="expanded tensor cannot be written in place"):
        hvd.allreduce_(torch.ones(1).expand(3))


def check_threads_wait_for_collectives_of_their_own():
    hvd.init()
    done = []

    def work(number):
        for _ in range(30):
            assert total(f"thread {number}") == SIZE
        done.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(done) == [0, 1, 2]
    handle = hvd.allreduce_async(torch.ones(1), name="nobody waits", op=hvd.Sum)
    wait_for(lambda: hvd.poll(handle))
    assert hvd.synchronize(handle).item() == SIZE


def check_collectives_of_other_sizes_on_each_rank():
    hvd.init()
    rows = torch.full((RANK + 1, 2), RANK)
    by_rank = [[rank] * 2 for rank in range(SIZE) for _ in range(rank + 1)]
    assert hvd.allgather(rows).tolist() == by_rank
    sent = torch.arange(SIZE * (RANK + 1)).float()
    got, received = hvd.alltoall(sent, torch.tensor([RANK + 1] * SIZE, dtype=torch.int32))
    assert received.tolist() == [rank + 1 for rank in range(SIZE)]
    assert got.tolist() == [RANK * (rank + 1) + i for rank in range(SIZE) for i in range(rank + 1)]
    whole = torch.arange(2 * SIZE + 1).float()
    scattered = hvd.reducescatter(whole, op=hvd.Sum)
    assert torch.equal(scattered, whole.tensor_split(SIZE)[RANK] * SIZE)
    assert hvd.broadcast_object({"from": RANK}, root_rank=SIZE - 1) == {"from": SIZE - 1}
    assert hvd.broadcast_object([RANK] if RANK == 0 else None) == [0]
    assert hvd.allgather_object("" if RANK else None) == [None, *[""] * (SIZE - 1)]
    assert hvd.allgather_object("x" * RANK) == ["x" * rank for rank in range(SIZE)]
    assert hvd.allreduce_(in_place := torch.tensor([RANK + 1]), op=hvd.Max) is in_place
    assert in_place.item() == SIZE
    one, other = hvd.grouped_allreduce([torch.ones(2), torch.full((3,), float(RANK))], op=hvd.Sum)
    assert one.tolist() == [SIZE] * 2
    assert other.tolist() == [sum(range(SIZE))] * 3


def check_gradients_pass_through_collectives():
    hvd.init()
    weight = torch.full((2,), 1.0, requires_grad=True)
    (hvd.allreduce(weight * (RANK + 1), op=hvd.Sum).sum() * (RANK + 1)).backward()
    assert weight.grad.tolist() == [sum(range(1, SIZE + 1)) * (RANK + 1.0)] * 2


def check_what_does_not_fit_is_an_error_on_every_rank():
    hvd.init()
    dtype, op = [(torch.float32, hvd.Sum), (torch.int32, hvd.Max)][RANK % 2]
    cases = {
        "allreduce.a: .*different shapes": lambda: hvd.allreduce(torch.zeros(RANK + 1), name="a"),
        "different data types": lambda: hvd.allreduce(torch.zeros(2, dtype=dtype)),
        "root ranks: rank 0 0, rank 1 1": lambda: hvd.broadcast(torch.zeros(1), RANK),
        "different reduce operations": lambda: hvd.allreduce(torch.zeros(1), op=op),
        "beyond the first dimension": lambda: hvd.allgather(torch.zeros(2, RANK + 1)),
    }
    for message, call in cases.items():
        with raised_by_all(hvd.HorovodInternalError, message):
            call()
    # a collective that the other ranks hold back, so that it is pending where it is asked again
    if RANK != 0:
        WORLD.Barrier()
    handle = hvd.allreduce_async(torch.zeros(1), name="twice")
    if RANK == 0:
        twice = r"allreduce\.twice: a collective of this name was submitted"
        with pytest.raises(ValueError, match=twice):
            hvd.allreduce_async(torch.zeros(1), name="twice")
        WORLD.Barrier()
    hvd.synchronize(handle)
    assert hvd.synchronize(handle) is None  # as Horovod
    no_values = torch.ones(1, device="meta")
    boolean = torch.ones(1, dtype=torch.bool)
    refused = {
        "was not created here, or was synchronized before": lambda: hvd.poll(handle),
        "a grouped allreduce got no tensors": lambda: hvd.grouped_allreduce_async([]),
        "op=Sum got a tensor of torch.bool. Use op=Max": lambda: hvd.allreduce(boolean, op=hvd.Sum),
        "found a tensor without values": lambda: hvd.allreduce(no_values, name="wrong"),
    }
    for message, call in refused.items():
        with pytest.raises(ValueError, match=message):
            call()
    assert total("afterwards") == SIZE


def check_join_adds_zeros_until_all_have_joined():
    hvd.init()
    last = SIZE - 1
    for step in range(3 if last == RANK else 1):
        assert total(f"step {step}") == (SIZE if step == 0 else 1)
    if last == RANK:
        assert total() == 1  # a call without a name, on this rank alone
    assert hvd.join() == last
    assert total() == SIZE
    for _ in range(2):  # names that are known, one of them pending where this rank joins
        assert total("known") == total("pending") == SIZE
        hvd.allgather(torch.ones(1), name="known rows")
        if last == RANK:
            assert total("known") == 1
            absent = r"allgather needs every rank, and rank\(s\) 0"
            with pytest.raises(hvd.HorovodInternalError, match=absent):
                hvd.allgather(torch.ones(1), name="known rows")
            hvd.join()
        else:
            handle = hvd.allreduce_async(torch.ones(1), name="pending", op=hvd.Sum)
            hvd.join()
            assert hvd.synchronize(handle).item() == SIZE - 1


def check_process_sets_communicate_by_themselves():
    hvd.init()
    alone = [hvd.add_process_set([rank]) for rank in range(SIZE)]
    assert total(process_set=alone[RANK]) == 1
    refused = {
        "does not contain this rank": lambda: total(process_set=alone[(RANK + 1) % SIZE]),
        r"of ranks \[0\] is there already": lambda: hvd.add_process_set([0]),
        r"different process sets: rank 0 \[0, 1\], rank 1 \[1\]": lambda: hvd.add_process_set(
            [[0, 1], [1]][min(RANK, 1)]
        ),
    }
    for message, call in refused.items():
        with pytest.raises(ValueError, match=message):
            call()
    if RANK == 0:
        total(process_set=alone[0])  # a call without a name, which others do not make
    assert total() == SIZE
    assert all(hvd.remove_process_set(one) for one in alone)
    assert not hvd.remove_process_set(hvd.global_process_set)


def check_the_timeline_has_rows_of_names(tmp_path):
    hvd.init()
    path = tmp_path / "timeline.json"
    hvd.start_timeline(str(path), mark_cycles=True)
    hvd.allreduce(torch.ones(3), name="gradient")
    hvd.stop_timeline()
    if RANK == 0:
        events = json.loads(path.read_text())["traceEvents"]
        named = [event for event in events if event["name"] == "thread_name"]
        rows = {event["tid"]: event["args"]["name"] for event in named}
        slices = [(rows[event["tid"]], event["name"]) for event in events if event["ph"] == "X"]
        own = [what for row, what in slices if row == "allreduce.gradient"]
        assert own == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"]
        assert ("cycles", "CYCLE_START") in slices
