"""Checks that every compressor passes on real ranks (one more in `COMPRESSORS` is found), and those of single ones."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import Parameter

from lightning_ring.comm.communicator import ReduceOp, Work, shard
from lightning_ring.gradients import Bucket, Reducer
from lightning_ring.gradients.compression import BF16, COMPRESSORS, FP16, Compressor, PowerSGD
from lightning_ring.gradients.sending import average_
from tests.checks.world import communicator, open_gloo

torch.set_num_threads(1)


class Ternary(Compressor):
    """A user's own, as the documentation describes one: signs and a scale, with error feedback, and nothing but
    `all_reduce`."""

    name = "ternary"

    def __init__(self) -> None:
        self.errors: dict[str, Tensor] = {}

    def all_reduce(self, bucket: Bucket, comm: Any, *, divisor: int, name: str) -> Work:
        size = bucket.flat.numel() - bucket.used.numel() - 1
        gradient = bucket.flat[:size]
        error = self.errors.setdefault(bucket.names[0], torch.zeros_like(gradient))
        wanted = gradient + error
        gradient.copy_(wanted.sign() * wanted.abs().mean())
        error.copy_(wanted - gradient)
        return average_(bucket.flat, comm, divisor, name)


WAYS: dict[str, Callable[[], Compressor]] = {**COMPRESSORS, "ternary": Ternary}
WAYS["powersgd"] = partial(PowerSGD, rank=2, start_iter=0)
ERROR_FED = ("powersgd", "ternary")


def parameters(seed: int = 0) -> list[tuple[str, Parameter]]:
    """A matrix, a vector, a scalar, an empty one, and a convolution as channels-last has it."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"matrix": (24, 31), "vector": (13,), "scalar": (), "empty": (0, 4), "conv": (16, 8, 3, 3)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    made["conv"] = made["conv"].to(memory_format=torch.channels_last)
    return [(name, Parameter(value)) for name, value in made.items()]


def gradients(rank: int, step: int = 0, scale: float = 1.0) -> list[Tensor]:
    """What ``rank`` contributes: known to every rank, so that each can compute the average itself."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [
        torch.empty_like(param).copy_(torch.randn(param.shape, generator=generator) * scale)
        for _, param in parameters()
    ]


def average(step: int = 0, scale: float = 1.0, ranks: int | None = None) -> list[Tensor]:
    """In float64, over the first ``ranks``."""
    size = ranks or communicator().world_size
    every = [gradients(rank, step, scale) for rank in range(size)]
    return [torch.stack([g.double() for g in same]).mean(0) for same in zip(*every, strict=True)]


def send(reducer: Reducer, params: list[Parameter], grads: list[Tensor | None]) -> list[Any]:
    """One backward that produces ``grads``, through the reducer; what it left in ``param.grad``."""
    for param in params:
        param.grad = None
    used = [(param, grad) for param, grad in zip(params, grads, strict=True) if grad is not None]
    with reducer.backward():
        if used:
            sum((param * grad).sum() for param, grad in used).backward()
    return [param.grad if param.grad is None else param.grad.clone() for param in params]


def make(way: str | Compressor, **kwargs: Any) -> tuple[Reducer, list[Parameter], list[str]]:
    named = parameters()
    warnings: list[str] = []
    compressor = WAYS[way]() if isinstance(way, str) else way
    reducer = Reducer(communicator(), named, compressor=compressor, warn=warnings.append, **kwargs)
    return reducer, [param for _, param in named], warnings


def assert_same_bits(*tensors: Tensor | None) -> None:
    flat = torch.cat([t.detach().reshape(-1).double() for t in tensors if t is not None] + [torch.zeros(1)])
    for other in communicator().all_gather(flat):
        assert torch.equal(other.nan_to_num(nan=7.0), flat.nan_to_num(nan=7.0)), "ranks hold different bits"


def check_mean_over_steps_is_the_true_average_on_all_ranks() -> None:
    """Unbiased, or what is lost in one step comes with a later one: `steps` times the same gradient."""
    for way in WAYS:
        reducer, params, _ = make(way)
        mine = gradients(communicator().rank)
        steps = 60 if way in ERROR_FED else 2
        total = [torch.zeros(p.shape, dtype=torch.float64) for p in params]
        for _ in range(steps):
            got = send(reducer, params, mine)
            assert_same_bits(*got)
            for sum_, grad in zip(total, got, strict=True):
                sum_ += grad
        wanted = torch.cat([g.reshape(-1) for g in average()])
        mean = torch.cat([g.reshape(-1) for g in total]) / steps
        error = float((mean - wanted).norm() / wanted.norm())
        assert error < (0.15 if way in ERROR_FED else 0.004), (way, error)
        if way not in ERROR_FED:  # rounding to nearest: as often up as down
            assert abs(float((mean - wanted).mean() / wanted.abs().mean())) < 0.002, way


def check_repeated_from_the_start_gives_the_same_bits() -> None:
    for way in WAYS:
        runs = []
        for _ in range(2):
            reducer, params, _ = make(way, bucket_cap_mb=0.002)
            steps = [send(reducer, params, gradients(communicator().rank, step)) for step in range(3)]
            runs.append(torch.cat([grad.reshape(-1) for step in steps for grad in step]))
        assert torch.equal(runs[0], runs[1]), way


def check_flags_survive() -> None:
    """A gradient that one rank has is averaged with zeros, one that none has stays `None`, and a stop reaches all."""
    rank, size = communicator().rank, communicator().world_size
    for way in WAYS:
        reducer, params, _ = make(way)
        for step in range(4):
            mine: list[Tensor | None] = list(gradients(rank, step))
            if rank != size - 1:
                mine[0] = None
            mine[4] = mine[4] if step == 3 else None
            reducer.stop_requested = step == 2 and rank == size - 1
            got = send(reducer, params, mine)
            assert got[0] is not None, way
            assert (got[4] is None) == (step < 3), (way, step)
            assert reducer.agreed_to_stop() == (step == 2), (way, step)
            assert_same_bits(*got)


def check_what_nobody_got_is_still_owed() -> None:
    """PowerSGD's error of a gradient that no rank used is not lost with the `None` that everybody is left with."""
    compressor = PowerSGD(start_iter=0)
    reducer, params, _ = make(compressor)
    mine: list[Tensor | None] = list(gradients(communicator().rank))
    send(reducer, params, mine)
    before = compressor._matrices["conv"].error.clone()
    assert before.norm() > 0
    send(reducer, params, [*mine[:4], None])
    assert torch.equal(compressor._matrices["conv"].error, before)


def check_divides_by_the_ranks_that_hold_data() -> None:
    size = communicator().world_size
    active = max(1, size - 1)
    for way in COMPRESSORS:
        exact = PowerSGD(rank=24, start_iter=0, min_compression=1) if way == "powersgd" else way
        reducer, params, _ = make(exact)
        reducer.active_ranks = active
        has_data = communicator().rank < active
        got = send(reducer, params, list(gradients(communicator().rank)) if has_data else [None] * len(params))
        for grad, wanted in zip(got, average(ranks=active), strict=True):
            torch.testing.assert_close(grad.double(), wanted, rtol=0.01, atol=0.02)
        assert_same_bits(*got)


def check_shards_hold_the_bits_of_the_whole() -> None:
    comm = communicator()
    for way in COMPRESSORS:
        compressor = WAYS[way]()
        if not compressor.can_shard:
            continue
        (name, param), flats = parameters()[4], []
        for collective in ("all_reduce", "reduce_scatter"):
            bucket = Bucket([name], [param])
            compressor.prepare(bucket)
            param.grad = gradients(comm.rank)[4]
            bucket.fill([True], stop=False)
            for divisor in (comm.world_size, comm.world_size + 1):
                getattr(compressor, collective)(bucket, comm, divisor=divisor, name=collective).wait()
                flats.append(shard(bucket.flat, comm.world_size, comm.shard_index).clone())
                param.grad = gradients(comm.rank)[4]
                bucket.fill([True], stop=False)
        assert torch.equal(flats[0], flats[2]), way
        assert torch.equal(flats[1], flats[3]), way


def check_large_values() -> None:
    """An average that float16 holds survives a sum that it does not; beyond it comes inf, on all ranks, and is said."""
    for way in ("fp16", "bf16"):
        with captured_log() as records:
            reducer, params, _ = make(way)
            got = send(reducer, params, [torch.full_like(p, 60_000.0) for p in params])
            assert all(torch.equal(g, torch.full_like(g, got[0][0, 0].item())) for g in got)
            torch.testing.assert_close(got[0][0, 0].item(), 60_000.0, rtol=4e-3, atol=0)
            assert not records
            last = communicator().rank == communicator().world_size - 1
            for _ in range(2):
                got = send(reducer, params, [torch.full_like(p, 7e4 if last else 0.0) for p in params])
                assert_same_bits(*got)
            assert torch.isinf(got[0]).all() == (way == "fp16")
            assert len(records) == (way == "fp16" and communicator().rank == 0), records


def check_a_step_that_is_not_finite_leaves_no_trace_in_powersgd() -> None:
    compressor = PowerSGD(start_iter=0)
    reducer, params, _ = make(compressor)
    mine = gradients(communicator().rank)
    send(reducer, params, mine)
    before = {name: matrix.error.clone() for name, matrix in compressor._matrices.items()}
    broken = [g.clone() for g in mine]
    if communicator().rank == 0:
        broken[0][3, 3] = torch.inf
    got = send(reducer, params, broken)
    assert not got[0].isfinite().any()
    assert_same_bits(*got)
    for name, matrix in compressor._matrices.items():
        assert torch.equal(matrix.error, before[name]), name
    for _ in range(3):
        got = send(reducer, params, mine)
        assert all(grad.isfinite().all() for grad in got)


def check_powersgd_original_is_sent_and_error() -> None:
    comm = communicator()
    compressor = PowerSGD(rank=2, start_iter=1)
    reducer, params, _ = make(compressor)
    names = [name for name, _ in parameters()]
    for step in range(5):
        mine = gradients(comm.rank, step)
        before = {name: matrix.error.clone() for name, matrix in compressor._matrices.items()}
        got = send(reducer, params, mine)
        if step == 0:  # whole
            wanted = average(step)
            assert all(torch.allclose(g.double(), w, atol=1e-6) for g, w in zip(got, wanted, strict=True))
        for name, matrix in compressor._matrices.items():
            index = names.index(name)
            original = as_rows(mine[index]) + before[name]
            sent = as_rows(got[index])
            if step == 0:
                assert not matrix.error.any()
                continue
            torch.testing.assert_close(sent + matrix.error, original, rtol=1e-5, atol=1e-6)
            assert torch.linalg.matrix_rank(sent.double(), rtol=1e-5) <= 2
            errors = torch.stack(comm.all_gather(matrix.error)).mean(0)
            originals = torch.stack(comm.all_gather(original)).mean(0)
            torch.testing.assert_close(sent + errors, originals, rtol=1e-5, atol=1e-5)
        assert set(before) == {"matrix", "conv"}


def as_rows(gradient: Tensor) -> Tensor:
    """The gradient of a weight as PowerSGD sees it: a row an output, in the order of memory."""
    order = (0, 2, 3, 1) if gradient.dim() == 4 else (0, 1)
    return gradient.permute(order).reshape(gradient.shape[0], -1).contiguous()


class HookBucket:
    """What torch's hook asks of a `GradBucket`, which has no constructor."""

    def __init__(self, flat: Tensor, views: list[Tensor]) -> None:
        self._flat, self._views = flat, views

    def buffer(self) -> Tensor:
        return self._flat

    def index(self) -> int:
        return 0

    def gradients(self) -> list[Tensor]:
        return self._views

    def is_last(self) -> bool:
        return True


def check_powersgd_equals_torchs_hook() -> None:
    """The same factors in, the same gradients and errors out, over several steps with warm start."""
    open_gloo()
    comm = communicator()
    group = dist.new_group(backend="gloo")
    weights = [(f"w{i}", Parameter(torch.zeros(shape))) for i, shape in enumerate([(20, 30), (16, 8, 3, 3), (9,)])]
    compressor = PowerSGD(rank=2, start_iter=0)
    bucket = Bucket([name for name, _ in weights], [param for _, param in weights])
    compressor.prepare(bucket)
    state = PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
    state.iter = 2
    plan = compressor._plans[bucket]
    state.q_memory_dict[0] = plan.second.clone()
    state.p_memory_dict[0] = torch.zeros(sum(matrix.p.numel() for matrix in plan.matrices))
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + comm.rank)
        for _, param in weights:
            param.grad = torch.randn(param.shape, generator=generator)
        flat = torch.cat([param.grad.reshape(-1) for _, param in weights])
        sizes = [param.numel() for _, param in weights]
        views = [part.view_as(param) for part, (_, param) in zip(flat.split(sizes), weights, strict=True)]
        powerSGD_hook(state, HookBucket(flat, views)).wait()  # type: ignore[arg-type]
        bucket.fill([True] * 3, stop=False)
        compressor.begin_backward()
        compressor.all_reduce(bucket, comm, divisor=comm.world_size, name="bucket").wait()
        for ours, theirs in zip(bucket.views, views, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        errors = torch.cat([matrix.error.reshape(-1) for matrix in plan.matrices])
        torch.testing.assert_close(errors, state.error_dict[0][: errors.numel()], rtol=1e-4, atol=1e-4)


def check_state_goes_on_at_the_same_size_and_resets_at_another() -> None:
    comm = communicator()
    whole, first = PowerSGD(start_iter=1), PowerSGD(start_iter=1)
    runs = [make(whole), make(first)]
    for step in range(3):
        for reducer, params, _ in runs:
            send(reducer, params, gradients(comm.rank, step))
    state = comm.broadcast_object(first.state_dict(comm))  # through a checkpoint that rank 0 wrote
    resumed = PowerSGD(start_iter=1)
    reducer, params, _ = make(resumed, bucket_cap_mb=0.002)  # in other buckets too
    assert resumed.load_state_dict(state, comm.rank, comm.world_size) is None
    for step in range(3, 6):
        again = send(reducer, params, gradients(comm.rank, step))
        expected = send(runs[0][0], runs[0][1], gradients(comm.rank, step))
        for a, b in zip(again, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    other = PowerSGD(start_iter=1)
    make(other)
    problem = other.load_state_dict(state, 0, comm.world_size + 1)
    assert problem is not None
    assert f"of {comm.world_size} ranks" in problem
    assert f"has {comm.world_size + 1} ranks" in problem
    assert all(not matrix.error.any() for matrix in other._matrices.values())
    for way in ("fp16", "bf16"):
        assert WAYS[way]().state_dict(comm) == {}


def check_converges_as_without() -> None:
    """A small classification problem that needs all of its gradient; every rank sees other data."""
    comm = communicator()
    generator = torch.Generator().manual_seed(5)
    xs = torch.randn(64 * comm.world_size, 20, generator=generator)
    ys = (xs @ torch.randn(20, 5, generator=generator)).argmax(1)
    torch.manual_seed(1)
    start = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 5))

    def train(compressor: Compressor | None) -> float:
        net = copy.deepcopy(start)
        reducer = Reducer(comm, net.named_parameters(), compressor=compressor)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for _ in range(60):
            optimizer.zero_grad()
            with reducer.backward():
                F.cross_entropy(net(xs[comm.rank :: comm.world_size]), ys[comm.rank :: comm.world_size]).backward()
            optimizer.step()
        assert_same_bits(*net.parameters())
        return F.cross_entropy(net(xs), ys).item()

    uncompressed = train(None)
    assert uncompressed < 0.25
    for way in COMPRESSORS:
        loss = train(WAYS[way]())
        assert loss < uncompressed * (1.35 if way in ERROR_FED else 1.02), (way, loss, uncompressed)


def check_other_dtypes_travel_as_they_are_and_this_is_said_once() -> None:
    comm = communicator()
    kinds = [torch.float64, torch.bfloat16, torch.complex64]
    for way in COMPRESSORS:
        named = [(f"{kind}", Parameter(torch.zeros(40, 40, dtype=kind))) for kind in kinds]
        warnings: list[str] = []
        reducer = Reducer(comm, named, compressor=WAYS[way](), warn=warnings.append)
        exact = [1.0 + 2.0**-7 + 2.0**-40, 1.0 + 2.0**-7, 1.0 + 2.0**-20]
        for _ in range(2):
            for _, param in named:
                param.grad = None
            with reducer.backward():
                sum((param * value).real.sum() for (_, param), value in zip(named, exact, strict=True)).backward()
        for (_, param), value in zip(named, exact, strict=True):
            tolerance = 1e-12 if way == "powersgd" else 0
            torch.testing.assert_close(param.grad.real, torch.full_like(param.real, value), rtol=tolerance, atol=0)
        refused = [kind for kind in kinds if not (way == "powersgd" and kind is torch.float64)]
        assert len(warnings) == len(refused), warnings
        assert all(any(str(kind) in warning for warning in warnings) for kind in refused), warnings


def check_half_the_bytes_leave() -> None:
    class Counting:
        def __init__(self) -> None:
            self.bytes = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(communicator(), name)

        def all_reduce_(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
            self.bytes += tensor.nbytes
            return communicator().all_reduce_(tensor, op=op, name=name)

    sent = {}
    for way in (None, BF16(), FP16(), PowerSGD(rank=1, start_iter=0)):
        counting = Counting()
        named = parameters()
        send(Reducer(counting, named, compressor=way), [p for _, p in named], gradients(communicator().rank))
        sent[way.name if way else None] = counting.bytes
    assert sent["bf16"] == sent["fp16"] == sent[None] // 2, sent
    assert sent["powersgd"] < sent[None] / 5, sent


@contextmanager
def captured_log() -> Iterator[list[logging.LogRecord]]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("lightning_ring")
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
