"""`lightning_ring.horovod` on real ranks."""

from __future__ import annotations

import copy
import functools
import json
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_ring.horovod as hvd
from lightning_ring.gradients.compression import ErrorFeedback, Int8
from tests.checks.loops import assert_same, batches, loss_of, network, sgd

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
torch.set_num_threads(1)


def check_names_may_come_in_another_order_on_each_rank() -> None:
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (RANK, SIZE)
    names = [f"tensor {number}" for number in range(40)]
    for _ in range(3):  # the second time names travel as numbers
        order = names if RANK == 0 else names[::-1]
        handles = {name: hvd.allreduce_async(torch.full((3,), float(names.index(name))), name=name) for name in order}
        for name in names:
            assert hvd.synchronize(handles[name]).tolist() == [float(names.index(name))] * 3


def check_a_steady_step_is_told_by_one_short_message() -> None:
    hvd.init()
    comm = hvd.global_process_set.negotiation.comm
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for method in ("all_reduce_", "all_gather_object"):
            real = getattr(comm, method)
            patch.setattr(comm, method, lambda *a, _m=method, _r=real, **k: (calls.append(_m), _r(*a, **k))[1])
        for step in range(4):
            hvd.barrier()
            calls.clear()
            handles = [hvd.allreduce_async_(torch.full((3,), 1.0), name=f"steady {i}", op=hvd.Sum) for i in range(20)]
            assert all(hvd.synchronize(handle).tolist() == [SIZE] * 3 for handle in handles)
            assert ("all_gather_object" in calls) == (step == 0)
        assert calls.count("all_reduce_") <= 6  # 2, if the thread did not begin a cycle in the middle of the step


def check_tensors_that_change_from_step_to_step() -> None:
    hvd.init()
    for step in range(6):
        numel = 1 + step // 2
        rows = 1 + (step + RANK) % 3  # other sizes on each rank, at each step
        gathered = hvd.allgather_async(torch.full((rows, 2), float(RANK)), name="rows")
        whole = hvd.allreduce_async(torch.ones(numel, dtype=torch.float64), name="numel", op=hvd.Sum)
        group = hvd.grouped_allreduce_async([torch.ones(2), torch.ones(numel)], name="group", op=hvd.Max)
        assert hvd.synchronize(gathered).shape[0] == sum(1 + (step + rank) % 3 for rank in range(SIZE))
        assert hvd.synchronize(whole).tolist() == [SIZE] * numel
        assert [part.tolist() for part in hvd.synchronize(group)] == [[1.0] * 2, [1.0] * numel]
    for _ in range(2):
        with pytest.raises(hvd.HorovodInternalError, match="submitted it with different groups"):
            hvd.grouped_allreduce([torch.ones(1)] * (2 + RANK), name="group of other sizes")
        assert hvd.grouped_allreduce([torch.ones(1)] * 3, name="group", op=hvd.Sum)[2].item() == SIZE


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
        handles += [hvd.allreduce_async_(tensor, name=name, op=hvd.Sum) for name, tensor in named.items()]
        with torch.device("meta"):  # a mode of the thread that waits
            results = [hvd.synchronize(handle) for handle in handles]
        assert [result is tensor for result, tensor in zip(results, [inferred, *named.values()], strict=True)] == [
            True
        ] * 5
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
                assert hvd.allreduce(torch.ones(5), name=f"thread {number}", op=hvd.Sum).tolist() == [SIZE] * 5
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
    assert hvd.allgather(rows).tolist() == [[rank] * 2 for rank in range(SIZE) for _ in range(rank + 1)]
    sent = torch.arange(SIZE * (RANK + 1)).float()
    got, received = hvd.alltoall(sent, torch.tensor([RANK + 1] * SIZE, dtype=torch.int32))
    assert received.tolist() == [rank + 1 for rank in range(SIZE)]
    assert got.tolist() == [float(RANK * (rank + 1) + i) for rank in range(SIZE) for i in range(rank + 1)]
    scattered = hvd.reducescatter(torch.arange(2 * SIZE + 1).float(), op=hvd.Sum)
    assert scattered.tolist() == [x * SIZE for x in torch.arange(2 * SIZE + 1).tensor_split(SIZE)[RANK].tolist()]
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
        (lambda: hvd.allreduce(torch.zeros(2, dtype=[torch.float32, torch.int32][RANK % 2])), "different data types"),
        (lambda: hvd.broadcast(torch.zeros(1), RANK), "different root ranks: rank 0 0, rank 1 1"),
        (lambda: hvd.allreduce(torch.zeros(1), op=[hvd.Sum, hvd.Max][RANK % 2]), "different reduce operations"),
        (lambda: hvd.allgather(torch.zeros(2, RANK + 1)), "different shapes beyond the first dimension"),
    ]
    for call, message in cases:
        with pytest.raises(hvd.HorovodInternalError, match=message) as caught:
            call()
        assert len(set(MPI.COMM_WORLD.allgather(str(caught.value)))) == 1
    handle = hvd.allreduce_async(torch.zeros(1), name="twice")
    if not hvd.poll(handle):
        with pytest.raises(ValueError, match=r"allreduce\.twice: a collective of this name was submitted"):
            hvd.allreduce_async(torch.zeros(1), name="twice")
    hvd.synchronize(handle)
    assert hvd.synchronize(handle) is None  # as Horovod
    with pytest.raises(ValueError, match="was not created here"):
        hvd.synchronize(10**9)
    with pytest.raises(ValueError, match="a grouped allreduce got no tensors"):
        hvd.grouped_allreduce_async([])
    with pytest.raises(ValueError, match=r"op=Adasum got a tensor of torch.int32, expected floating point"):
        hvd.allreduce(torch.zeros(1, dtype=torch.int32), op=hvd.Adasum)


def check_join_adds_zeros_until_all_have_joined() -> None:
    hvd.init()
    last = SIZE - 1
    for step in range(3 if last == RANK else 1):
        found = hvd.allreduce(torch.ones(2), name=f"step {step}", op=hvd.Sum)
        assert found.tolist() == [SIZE if step == 0 else 1] * 2
    if last == RANK:
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 1  # a call without a name, on this rank alone
    assert hvd.join() == last
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == SIZE
    for _ in range(2):  # names that are known, one of them pending where this rank joins
        hvd.allreduce(torch.ones(2), name="known", op=hvd.Sum)
        hvd.allgather(torch.ones(1), name="known rows")
        assert hvd.allreduce(torch.ones(1), name="pending", op=hvd.Sum).item() == SIZE
        if last == RANK:
            assert hvd.allreduce(torch.ones(2), name="known", op=hvd.Sum).tolist() == [1, 1]
            with pytest.raises(hvd.HorovodInternalError, match=r"allgather needs every rank, and rank\(s\) 0"):
                hvd.allgather(torch.ones(1), name="known rows")
        handle = hvd.allreduce_async(torch.ones(1), name="pending", op=hvd.Sum) if last != RANK else None
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
    with pytest.raises(ValueError, match=r"asked for different process sets: rank 0 \[0, 1\], rank 1 \[1\]"):
        hvd.add_process_set([[0, 1], [1]][min(RANK, 1)])
    if RANK == 0:
        hvd.allreduce(torch.ones(1), process_set=alone[0])  # a call without a name, which others do not make
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == SIZE
    assert all(hvd.remove_process_set(one) for one in alone)
    assert not hvd.remove_process_set(hvd.global_process_set)


def check_batch_norm_sees_the_samples_of_all_ranks() -> None:
    hvd.init()
    rows = [2 + rank for rank in range(SIZE)]
    rows[-1] = 0 if SIZE > 2 else 1
    torch.manual_seed(0)
    for shape, options in (((3, 5), {"momentum": None}), ((4,), {"affine": False}), ((3, 2, 2), {}), ((3, 1), {})):
        ours = hvd.SyncBatchNorm(shape[0], **options).double()
        whole = torch.nn.BatchNorm1d(shape[0], **options) if len(shape) < 3 else torch.nn.BatchNorm2d(shape[0])
        whole.double()
        if ours.affine:
            with torch.no_grad():
                for module in (ours, whole):
                    module.weight.copy_(torch.arange(1.0, shape[0] + 1))
        for _ in range(2):
            everyones = torch.randn(sum(rows), *shape, dtype=torch.float64).add_(100).requires_grad_()
            factors = torch.randn(sum(rows), *shape, dtype=torch.float64)
            mine = everyones.detach().split(rows)[RANK].clone().requires_grad_()
            output = ours(mine)
            expected = whole(everyones)
            torch.testing.assert_close(output, expected.split(rows)[RANK], atol=1e-10, rtol=1e-10)
            (output * factors.split(rows)[RANK]).sum().backward()
            (expected * factors).sum().backward()
            assert everyones.grad is not None
            torch.testing.assert_close(mine.grad, everyones.grad.split(rows)[RANK], atol=1e-10, rtol=1e-10)
        for name, buffer in whole.named_buffers():
            torch.testing.assert_close(ours.get_buffer(name), buffer, atol=1e-10, rtol=1e-10)
        for name, param in whole.named_parameters():
            total = hvd.allreduce(ours.get_parameter(name).grad, op=hvd.Sum)
            torch.testing.assert_close(total, param.grad, atol=1e-10, rtol=1e-10)
        inputs = torch.randn(2, *shape, dtype=torch.float64)
        torch.testing.assert_close(ours.eval()(inputs), whole.eval()(inputs))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training, got 1"):
        hvd.SyncBatchNorm(2)(torch.zeros(int(RANK == 0), 2))
    half = hvd.SyncBatchNorm(2)(torch.randn(3, 2).to(torch.bfloat16))
    assert half.dtype == torch.bfloat16


def adasum(vectors: list[Any]) -> Any:
    """Of the ranks' vectors, in NumPy: lower ranks with upper ones, in pairs, then pairs of pairs."""
    if len(vectors) == 1:
        return vectors[0]
    pairs = []
    for a, b in zip(vectors[::2], vectors[1::2], strict=True):
        dot = float(np.dot(a, b))
        own = 1 - dot / (2 * np.dot(a, a)) if np.any(a) else 1.0
        other = 1 - dot / (2 * np.dot(b, b)) if np.any(b) else 1.0
        pairs.append(own * a + other * b)
    return adasum(pairs)


def check_adasum_equals_its_definition() -> None:
    hvd.init()
    random = np.random.default_rng(0)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 1e-2)):
        for numel in (1, 2, 7, 300_000):
            vectors = list(random.standard_normal((SIZE, numel)))
            vectors[1] = vectors[0] * 2 + vectors[1] / 10  # almost parallel
            if numel == 2:
                vectors[0] *= 0
            mine = torch.tensor(vectors[RANK]).to(dtype)
            for _ in range(2):
                found = hvd.allreduce(mine, name=f"adasum {numel} {dtype}", op=hvd.Adasum)
                np.testing.assert_allclose(found.double(), adasum(vectors), rtol=tolerance, atol=3 * tolerance)
                assert len({bytes(bits) for bits in MPI.COMM_WORLD.allgather(found.numpy().tobytes())}) == 1
    shapes = [(3, 2), (0,), (), (5,), (1,), (4, 4)]
    group = [[random.standard_normal(shape) for _ in range(SIZE)] for shape in shapes]
    found = hvd.grouped_allreduce([torch.tensor(ranks[RANK]) for ranks in group], op=hvd.Adasum, prescale_factor=2.0)
    for one, ranks in zip(found, group, strict=True):  # each tensor by itself
        np.testing.assert_allclose(one.flatten(), adasum([2 * vector.flatten() for vector in ranks]), rtol=1e-12)
    equal = torch.arange(4.0)
    assert torch.equal(hvd.allreduce(equal, op=hvd.Adasum), equal)
    orthogonal = torch.zeros(SIZE).index_fill_(0, torch.tensor([RANK]), 1.0)
    assert torch.equal(hvd.allreduce_(orthogonal, op=hvd.Adasum), torch.ones(SIZE))
    if SIZE > 2:
        three = hvd.add_process_set([0, 1, 2])
        with pytest.raises(NotImplementedError, match="needs a power of two of them; there are 3"):
            hvd.allreduce(torch.ones(1), op=hvd.Adasum, process_set=three)
        hvd.remove_process_set(three)


def check_the_optimizer_combines_steps_by_adasum() -> None:
    hvd.init()
    model = network().double()
    references = [copy.deepcopy(model) for _ in range(SIZE)]
    make = functools.partial(torch.optim.Adam, lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), backward_passes_per_step=2, op=hvd.Adasum
    )
    others = [make(reference.parameters()) for reference in references]
    everyones: list[Any] = MPI.COMM_WORLD.allgather([batch.double() for batch in batches(6)])
    for step in range(3):
        starts = [param.detach().clone() for param in model.parameters()]
        for net, one, loader in zip(
            [model, *references], [optimizer, *others], [everyones[RANK], *everyones], strict=True
        ):
            one.zero_grad()
            for inputs in loader[2 * step : 2 * step + 2]:
                loss_of(net(inputs)).backward()
            one.step()
        for index, (start, param) in enumerate(zip(starts, model.parameters(), strict=True)):
            ranks = [list(reference.parameters())[index] for reference in references]
            deltas = [(param.detach() - start).flatten().numpy() for param in ranks]
            after = start.flatten().numpy() + adasum(deltas)
            np.testing.assert_allclose(
                list(model.parameters())[index].detach().flatten(), after, rtol=1e-10, atol=1e-12
            )
            for param in ranks:
                param.data.copy_(torch.tensor(after).view_as(param))
    with pytest.raises(AssertionError, match="Skipping synchronization is not supported"), optimizer.skip_synchronize():
        pass
    optimizer.synchronize()


def check_the_optimizer_equals_ddp() -> None:
    hvd.init()
    model, reference = network(seed=RANK), network(seed=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    wrapped, plain = DistributedDataParallel(reference), sgd(reference)
    for inputs in batches(5):
        for net, one in ((wrapped, plain), (model, optimizer)):
            one.zero_grad()
            loss_of(net(inputs)).backward()
            if one is optimizer:
                one.synchronize()
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            with optimizer.skip_synchronize() if one is optimizer else warnings.catch_warnings():
                one.step()
    assert_same(model, reference)


def check_accumulation_sums_and_sum_and_compression() -> None:
    hvd.init()
    for op, factor in ((hvd.Average, 1.0), (hvd.Sum, float(SIZE))):
        model = network()
        expected = copy.deepcopy(model)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            named_parameters=model.named_parameters(),
            backward_passes_per_step=2,
            op=op,
        )
        mine = batches(4)
        everyones: list[Any] = MPI.COMM_WORLD.allgather(mine)
        plain = torch.optim.SGD(expected.parameters(), lr=0.1)
        for step in range(2):
            for net, one, loaders in ((model, optimizer, [mine]), (expected, plain, everyones)):
                one.zero_grad()
                for loader in loaders:
                    for number, inputs in enumerate(loader[2 * step : 2 * step + 2]):
                        scale = factor / SIZE if net is expected else 1.0
                        (loss_of(net(inputs)) * scale).backward()
                        if net is model:  # after the first one of two, gradients are this rank's own
                            grads: list[Any] = MPI.COMM_WORLD.allgather(net[0].weight.grad.flatten().tolist())
                            assert len({tuple(grad) for grad in grads}) == (SIZE if number == 0 else 1)
                one.step()
        assert_same(model, expected, tolerance=1e-6)
    model = network()
    half = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), compression=hvd.Compression.fp16)
    loss_of(model(batches(1)[0])).backward()
    half.step()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    assert grads
    assert all(torch.equal(grad, grad.half().float()) for grad in grads)


def check_compressors_of_the_strategy_carry_gradients() -> None:
    hvd.init()
    for compression, tolerance in ((Int8(min_numel=1), 0.01), ("bf16", 0.01), (ErrorFeedback(Int8(min_numel=1)), 0.01)):
        model = network()
        before = [param.detach().clone() for param in model.parameters()]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), compression=compression
        )
        loss_of(model(batches(1)[0])).backward()
        own = [param.grad.clone() for param in model.parameters()]
        optimizer.step()
        for param, start, grad in zip(model.parameters(), before, own, strict=True):
            mean = torch.from_numpy(np.mean(MPI.COMM_WORLD.allgather(grad.numpy()), 0))
            found = start - param.detach()
            assert (found - mean).abs().max() <= tolerance * mean.abs().max() + 1e-6
            assert len({each.tobytes() for each in MPI.COMM_WORLD.allgather(param.detach().numpy())}) == 1
    model = network()
    with pytest.raises(ValueError, match=r"compression='int9' with op=Average, expected .*, fp16 or bf16, one of fp16"):
        hvd.DistributedOptimizer(sgd(model), model.named_parameters(), compression="int9")
    with pytest.raises(ValueError, match=r"fp16 or bf16\.$"):
        hvd.DistributedOptimizer(sgd(model), model.named_parameters(), compression="int8", op=hvd.Adasum)
    with pytest.raises(ValueError, match="momentum twice"):
        hvd.DistributedOptimizer(sgd(model), model.named_parameters(), compression="dgc")


def check_a_rank_without_gradients_takes_part_with_zeros() -> None:
    hvd.init()
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    for _ in range(2):
        if RANK == 0:
            model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.allclose(model.weight, torch.full((1, 2), 1.0 - 2 / SIZE))


def check_the_timeline_has_rows_of_names(tmp_path: Path) -> None:
    hvd.init()
    path = tmp_path / "timeline.json"
    hvd.start_timeline(str(path), mark_cycles=True)
    hvd.allreduce(torch.ones(3), name="gradient")
    hvd.stop_timeline()
    if RANK == 0:
        events = json.loads(path.read_text())
        rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        named = [(rows[event["tid"]], event["name"]) for event in events if event["ph"] == "X"]
        assert named == [("allreduce.gradient", "NEGOTIATE_ALLREDUCE"), ("allreduce.gradient", "ALLREDUCE")]
        assert any(event["name"] == "CYCLE_START" for event in events)


def check_an_error_of_one_rank_reaches_the_others() -> None:
    hvd.init()
    tensors = [torch.ones(2), torch.ones(3)]
    handles = [hvd.allreduce_async_(tensor, name=f"resized {i}") for i, tensor in enumerate(tensors)]
    if RANK == 0:
        tensors[0].resize_(7)  # after it was told
    for handle in handles:
        with pytest.raises(hvd.HorovodInternalError):
            hvd.synchronize(handle)
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(torch.ones(1))
    hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == SIZE


def check_shutdown_ends_what_is_pending() -> None:
    hvd.init()
    handle = hvd.allreduce_async(torch.ones(1), name=f"of rank {RANK} alone")
    hvd.shutdown()
    with pytest.raises(hvd.HorovodInternalError, match="was shut down on some rank"):
        hvd.synchronize(handle)
    hvd.init()
    handle = hvd.allreduce_async(torch.ones(1), name="pending") if RANK == 0 else None
    if handle is None:
        hvd.shutdown()
    else:
        with pytest.raises(hvd.HorovodInternalError, match="was shut down on some rank"):
            hvd.synchronize(handle)
        hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == SIZE


def check_shutdown_ends_what_other_ranks_wait_for_in_any_process_set() -> None:
    for waits_for_all in (True, False):
        hvd.init()
        some = hvd.add_process_set([0, 1]) if SIZE > 2 else hvd.global_process_set
        if RANK == 0 or (waits_for_all and RANK != 1):
            with pytest.raises(hvd.HorovodInternalError, match="was shut down on some rank"):
                hvd.barrier(hvd.global_process_set if waits_for_all else some)
        else:
            hvd.shutdown()
        hvd.init()  # rank 0 has not called shutdown
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == SIZE
        hvd.shutdown()


def check_shut_down_and_begin_again() -> None:
    hvd.init()
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.rank()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == SIZE
    hvd.shutdown()
