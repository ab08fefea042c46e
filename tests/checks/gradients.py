"""Checks of the reducer on real ranks: each compares with one process that sees every rank's batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ring.comm.communicator import ReduceOp, Work
from lightning_ring.gradients import AutoBuckets, Reducer, plan_buckets
from tests.checks.world import communicator

torch.set_num_threads(1)


class Recorder:
    """Passes everything on to ``comm`` and notes what leaves, and which gradients exist by then."""

    def __init__(self, comm: Any, module: nn.Module) -> None:
        self._comm = comm
        self._module = module
        self.sent: list[str] = []
        self.elements = 0
        self.produced: set[str] = set()
        self.produced_when_sent: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_reduce_(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        self.sent.append(name)
        self.elements += tensor.numel()
        self.produced_when_sent.append(len(self.produced))
        return self._comm.all_reduce_(tensor, op=op, name=name)


class Net(nn.Module):
    """Six layers, float64; ``path`` says which are used, in order; segments of two may be checkpointed."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(6)])
        self.reentrant = reentrant
        self.double()

    def _segment(self, x: Tensor, *indices: int) -> Tensor:
        for index in indices:
            x = torch.tanh(self.layers[index](x))
        return x

    def forward(self, x: Tensor, path: tuple[int, ...] = (0, 1, 2, 3, 4, 5)) -> Tensor:
        for first in range(0, len(path), 2):
            pair = path[first : first + 2]
            if self.reentrant is None:
                x = self._segment(x, *pair)
            else:
                x = checkpoint(self._segment, x, *pair, use_reentrant=self.reentrant)
        return x.square().mean()


def make(cap_mb: float = 0.0006, **kwargs: Any) -> tuple[Net, Net, Reducer, Recorder, list[str]]:
    """A net, its copy for the comparison, and a reducer whose buckets hold about one layer each."""
    torch.manual_seed(0)
    net = Net(**kwargs)
    reference = copy.deepcopy(net)
    reference.reentrant = None
    warnings: list[str] = []
    comm = Recorder(communicator(), net)
    for name, param in net.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: comm.produced.add(name))
    reducer = Reducer(comm, net.named_parameters(), bucket_cap_mb=cap_mb, warn=warnings.append)
    return net, reference, reducer, comm, warnings


def batches(step: int = 0) -> list[Tensor]:
    """The batch of every rank, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    size = communicator().world_size
    return [torch.randn(4, 8, dtype=torch.float64, generator=generator) for _ in range(size)]


def mine(xs: list[Tensor]) -> Tensor:
    return xs[communicator().rank].clone().requires_grad_()  # reentrant checkpointing wants an input with gradient


def reference_mean(reference: Net, losses: Callable[[Tensor, int], Tensor], xs: list[Tensor]) -> None:
    (sum(losses(x, rank) for rank, x in enumerate(xs)) / len(xs)).backward()


def assert_same(net: nn.Module, reference: nn.Module, *, rtol: float = 1e-12) -> None:
    for (name, param), expected in zip(net.named_parameters(), reference.parameters(), strict=True):
        if expected.grad is None:
            assert param.grad is None, f"{name} has a gradient, expected none"
            continue
        assert param.grad is not None, f"{name} has no gradient"
        torch.testing.assert_close(param.grad, expected.grad, rtol=rtol, atol=1e-14, msg=lambda m, n=name: f"{n}: {m}")
    grads = [param.grad for param in net.parameters() if param.grad is not None]
    flat = torch.cat([grad.reshape(-1).double() for grad in grads]) if grads else torch.zeros(0)
    for other in communicator().all_gather(flat):
        assert torch.equal(other, flat), "ranks hold different bits"


@contextmanager
def fresh_gradients(*modules: nn.Module, set_to_none: bool = True) -> Iterator[None]:
    for module in modules:
        module.zero_grad(set_to_none=set_to_none)
    yield


def check_mean_equals_one_process() -> None:
    net, reference, reducer, _, _ = make()
    for step in range(4):
        xs = batches(step)
        with fresh_gradients(net, reference, set_to_none=step % 2 == 0), reducer.backward():
            net(mine(xs)).backward()
        reference_mean(reference, lambda x, _: reference(x), xs)
        assert_same(net, reference)


def check_plain_backward_is_finished_by_the_engine() -> None:
    for reentrant in (None, False):
        net, reference, reducer, _, _ = make(reentrant=reentrant)
        xs = batches()
        net(mine(xs)).backward()
        assert reducer.num_finished == 1
        reference_mean(reference, lambda x, _: reference(x), xs)  # noqa: B023
        assert_same(net, reference)


def check_first_bucket_leaves_before_the_last_gradient() -> None:
    net, _, reducer, comm, _ = make()
    with reducer.backward():
        net(mine(batches())).backward()
    total = len(list(net.parameters()))
    assert len(comm.sent) == len(reducer.buckets) > 2
    assert comm.produced_when_sent[0] < total / 2, comm.produced_when_sent
    assert comm.produced_when_sent == sorted(comm.produced_when_sent)


def check_checkpointing_of_both_kinds() -> None:
    for reentrant in (True, False):
        for path in ((0, 1, 2, 3, 4, 5), (2, 3, 2, 3, 4, 5)):  # the second uses a checkpointed segment twice
            net, reference, reducer, _, warnings = make(reentrant=reentrant)
            for step in range(3):
                xs = batches(step)
                with fresh_gradients(net, reference), reducer.backward():
                    net(mine(xs), path).backward()
                reference_mean(reference, lambda x, _: reference(x, path), xs)  # noqa: B023
                assert_same(net, reference)
            twice = reentrant and path[0] == 2
            assert len(warnings) == (1 if twice else 0), warnings


def check_unused_parameters_differ_by_rank() -> None:
    net, reference, reducer, _, _ = make()

    def path(rank: int, step: int) -> tuple[int, ...]:
        return (0, 1, 2, 3) if (rank + step) % 2 else (0, 1, 3, 2) if step == 2 else (2, 3)  # 4 and 5: never

    for step in range(3):
        xs = batches(step)
        with fresh_gradients(net, reference), reducer.backward():
            net(mine(xs), path(communicator().rank, step)).backward()
        reference_mean(reference, lambda x, rank: reference(x, path(rank, step)), xs)  # noqa: B023
        assert_same(net, reference)


def check_rank_without_backward_averages_zeros() -> None:
    net, reference, reducer, _, _ = make()
    xs = batches()
    if communicator().rank == 0:
        with reducer.backward():
            net(mine(xs)).backward()
    else:
        reducer.reduce_without_backward()
    (reference(xs[0]) / len(xs)).backward()
    assert_same(net, reference)


def check_no_rank_with_a_backward_leaves_no_gradient() -> None:
    net, reference, reducer, _, _ = make()
    reducer.reduce_without_backward()
    assert_same(net, reference)


def check_earlier_average_of_unused_parameters_stays() -> None:
    net, reference, reducer, _, _ = make()
    for path in ((0, 1, 2, 3), (4, 5), (4, 5)):  # no zero_grad between: gradients of 0 to 3 must survive the others
        xs = batches()
        with reducer.backward():
            net(mine(xs), path).backward()
        reference_mean(reference, lambda x, _: reference(x, path), xs)  # noqa: B023
        assert_same(net, reference)


def check_second_backward_does_not_average_the_first_twice() -> None:
    net, reference, reducer, _, _ = make()
    for step in range(2):
        xs = batches(step)
        with reducer.backward():
            net(mine(xs)).backward()
        reference_mean(reference, lambda x, _: reference(x), xs)
    assert_same(net, reference)


def check_accumulation_travels_once() -> None:
    net, reference, reducer, comm, _ = make()
    for window in range(2):
        with fresh_gradients(net, reference, set_to_none=window == 0):
            comm.sent.clear()
        for micro in range(3):
            xs = batches(10 * window + micro)
            # layers 4 and 5 only in the first micro-batch: their gradient travels though the last has none for them
            path = (0, 1, 2, 3, 4, 5) if micro == 0 else (0, 1, 2, 3)
            if micro < 2:
                with reducer.no_sync(), reducer.backward():
                    net(mine(xs), path).backward()
                assert not comm.sent
            else:
                with reducer.backward():
                    net(mine(xs), path).backward()
            reference_mean(reference, lambda x, _: reference(x, path), xs)  # noqa: B023
        assert len(comm.sent) == len(reducer.buckets)
        assert_same(net, reference)


def check_frozen_and_thawed_parameters() -> None:
    torch.manual_seed(0)
    net = Net()
    for index in (0, 1, 2):
        net.layers[index].requires_grad_(False)
    reference = copy.deepcopy(net)
    comm = Recorder(communicator(), net)
    reducer = Reducer(comm, net.named_parameters(), bucket_cap_mb=0.0006)
    for thawed in (False, True):
        if thawed:
            for module in (net, reference):
                module.layers[2].requires_grad_(True)
                module.layers[5].requires_grad_(False)
            reducer.track(net.named_parameters())
        comm.sent.clear()
        xs = batches()
        with fresh_gradients(net, reference), reducer.backward():
            net(mine(xs)).backward()
        reference_mean(reference, lambda x, _: reference(x), xs)
        assert_same(net, reference)
        assert len(comm.sent) == 3, comm.sent  # three layers train; the frozen ones stay at home


def check_two_optimizers_of_a_gan() -> None:
    torch.manual_seed(0)
    generator, critic = Net(), Net()
    references = copy.deepcopy((generator, critic))
    both = nn.ModuleList([generator, critic])
    reducer = Reducer(communicator(), both.named_parameters(), bucket_cap_mb=0.0006)

    def losses(pair: tuple[Net, Net], x: Tensor) -> tuple[Tensor, Tensor]:
        fake = pair[0]._segment(x, 0, 1, 2)
        return pair[1](fake.detach()) - pair[1](x), -pair[1](fake)

    for step in range(2):
        xs = batches(step)
        for which in (
            0,
            1,
        ):  # the critic's gradients must survive the generator's backward, which reaches the critic too
            with reducer.backward():
                losses((generator, critic), mine(xs))[which].backward()
            reference_mean(references[0], lambda x, _: losses(references, x)[which], xs)  # noqa: B023
        assert_same(generator, references[0])
        assert_same(critic, references[1])


def check_shared_parameters() -> None:
    net, reference, reducer, _, _ = make()
    for module in (net, reference):
        module.layers[5] = module.layers[0]
    reducer.remove()
    reducer = Reducer(communicator(), net.named_parameters(remove_duplicate=False), bucket_cap_mb=0.0006)
    xs = batches()
    with reducer.backward():
        net(mine(xs)).backward()
    reference_mean(reference, lambda x, _: reference(x), xs)
    assert_same(net, reference)


def check_double_backward() -> None:
    net, reference, reducer, _, _ = make()

    def penalised(module: Net, x: Tensor) -> Tensor:
        x = x.detach().clone().requires_grad_()
        loss = module(x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()

    xs = batches()
    with reducer.backward():
        penalised(net, mine(xs)).backward()
    reference_mean(reference, lambda x, _: penalised(reference, x), xs)
    assert_same(net, reference)


def check_sparse_gradients_become_dense() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)).double()
    reference = copy.deepcopy(net)
    reference[0].sparse = False
    warnings: list[str] = []
    reducer = Reducer(communicator(), net.named_parameters(), warn=warnings.append)
    rank, size = communicator().rank, communicator().world_size
    for _ in range(2):
        with fresh_gradients(net, reference), reducer.backward():
            net(torch.tensor([rank, 7])).sum().backward()
        (sum(reference(torch.tensor([r, 7])).sum() for r in range(size)) / size).backward()
        assert_same(net, reference)
    assert len(warnings) == 1
    assert "0.weight" in warnings[0]


def check_mixed_dtypes_and_layouts() -> None:
    torch.manual_seed(0)
    net = nn.ModuleList(
        [
            nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
            nn.Linear(4, 4, dtype=torch.float64),
            nn.Linear(4, 2),
        ]
    )
    scalar = nn.Parameter(torch.tensor(2.0))
    net.register_parameter("scalar", scalar)
    net.register_parameter("empty", nn.Parameter(torch.zeros(0, 3)))
    reference = copy.deepcopy(net)

    def loss(module: nn.ModuleList, x: Tensor) -> Tensor:
        hidden = module[0](x).mean((2, 3))
        return (module[2](module[1](hidden.double()).float()) * module.scalar).sum() + module.empty.sum()

    reducer = Reducer(communicator(), net.named_parameters())
    rank, size = communicator().rank, communicator().world_size
    xs = [torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    for _ in range(2):
        with fresh_gradients(net, reference), reducer.backward():
            loss(net, xs[rank]).backward()
        (sum(loss(reference, x) for x in xs) / size).backward()
        assert_same(net, reference, rtol=1e-5)
        assert net[0].weight.grad.stride() == net[0].weight.stride()


def check_order_of_use_replaces_order_of_registration() -> None:
    torch.manual_seed(0)
    net = Net()
    reference = copy.deepcopy(net)
    path = (5, 4, 3, 2, 1, 0)  # used in the reverse of registration: before the rebuild nothing can leave early
    comm = Recorder(communicator(), net)
    for name, param in net.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: comm.produced.add(name))
    reducer = Reducer(comm, net.named_parameters(), bucket_cap_mb=0.0006)
    for step in range(2):
        comm.produced.clear()
        comm.produced_when_sent.clear()
        xs = batches(step)
        with fresh_gradients(net, reference), reducer.backward():
            net(mine(xs), path).backward()
        reference_mean(reference, lambda x, _: reference(x, path), xs)
        assert_same(net, reference)
    assert comm.produced_when_sent[0] < 6, comm.produced_when_sent
    assert reducer.buckets[0].names[0].startswith("layers.0"), reducer.buckets[0].names


def check_request_to_stop_reaches_all_ranks() -> None:
    net, _, reducer, _, _ = make()
    last = communicator().world_size - 1
    for step in range(3):
        if step == 1 and communicator().rank == last:
            reducer.stop_requested = True
        with reducer.backward():
            net(mine(batches())).backward()
        assert reducer.agreed_to_stop() == (step >= 1)
        assert not reducer.agreed_to_stop()  # asked and answered


def check_divides_by_the_ranks_that_hold_data() -> None:
    net, reference, reducer, _, _ = make()
    xs = batches()
    size = communicator().world_size
    active = max(1, size - 1)
    reducer.active_ranks = active
    if communicator().rank < active:
        with reducer.backward():
            net(mine(xs)).backward()
    else:
        reducer.reduce_without_backward()
    (sum(reference(x) for x in xs[:active]) / active).backward()
    assert_same(net, reference)


def check_exception_in_backward_leaves_the_reducer_usable() -> None:
    net, reference, reducer, _, _ = make()

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ValueError("planted")

    try:
        with reducer.backward():
            net(Failing.apply(mine(batches()))).backward()
    except ValueError:
        pass
    else:
        raise AssertionError("the planted error was swallowed")
    xs = batches(1)
    with fresh_gradients(net, reference), reducer.backward():
        net(mine(xs)).backward()
    reference_mean(reference, lambda x, _: reference(x), xs)
    assert_same(net, reference)


def check_buckets_are_filled_in_order_and_bounded() -> None:
    params = [(f"p{i}", nn.Parameter(torch.zeros(size))) for i, size in enumerate([10, 200_000, 200_000, 5_000_000, 7])]
    params.insert(2, ("half", nn.Parameter(torch.zeros(9, dtype=torch.float16))))
    buckets = plan_buckets(params, bucket_cap_mb=2.0, first_bucket_mb=1.0)
    assert [bucket.names for bucket in buckets] == [["p0", "p1"], ["half"], ["p2"], ["p3"], ["p4"]]


def check_automatic_buckets_are_the_same_on_all_ranks_and_change_no_number() -> None:
    comm = communicator()
    said: list[str] = []
    results = []
    for auto in (None, AutoBuckets(comm, said.append, default_cap_mb=0.0006)):
        torch.manual_seed(0)
        net = Net()
        net.register_parameter("other", nn.Parameter(torch.ones(3)))  # a dtype of its own
        reducer = Reducer(comm, net.named_parameters(), bucket_cap_mb=0.0006, auto=auto)
        for step in range(7):
            with fresh_gradients(net), reducer.backward():
                (net(mine(batches(step))) * net.other.sum()).backward()
            results.append(torch.cat([param.grad.reshape(-1).double() for param in net.parameters()]))
        names = [bucket.names for bucket in reducer.buckets]
        assert sorted(name for bucket in names for name in bucket) == sorted(name for name, _ in net.named_parameters())
        assert comm.broadcast_object(names) == names
    for fixed, chosen in zip(results[:7], results[7:], strict=True):
        torch.testing.assert_close(chosen, fixed, rtol=0 if comm.world_size <= 2 else 1e-12, atol=0)
    assert len(said) == 1
    assert f"chose {len(reducer.buckets)} bucket(s)" in said[0]
    last = {bucket.flat.dtype: bucket for bucket in reducer.buckets}
    assert set(last) == {torch.float32, torch.float64}
