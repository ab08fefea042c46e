"""Compressors and algorithms: the bytes that plan counts, the steps that it predicts, and what
it recommends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.algorithms.exchanges import (
    EXCHANGES,
    Exchange,
    asynchronous_gossip,
    diloco,
    gossip,
    local_sgd,
    num_gossip_parts,
    parameter_server,
)
from lightning_ring.algorithms.local import AsynchronousGossip, DiLoCo, Gossip, LocalSGD
from lightning_ring.algorithms.server import ParameterServer
from lightning_ring.comm.cost import CostModel
from lightning_ring.gradients.bucket import Bucket
from lightning_ring.gradients.compression import PowerSGD
from lightning_ring.gradients.compression.registry import COMPRESSORS
from lightning_ring.gradients.delivery import average_compressed_, prepare_compressed
from lightning_ring.tools.plan import probing
from lightning_ring.tools.plan.choice import (
    choices,
    predict_exchange,
    predict_paces,
    recommended,
    sent_bytes,
)
from lightning_ring.tools.plan.model import Cluster, Link, Settings, predict
from lightning_ring.tools.plan.probing import OneGradient, SilentCommunicator
from lightning_ring.tools.plan.profile import Questions, Run
from tests.thread_ranks import ThreadTransport, run_ranks
from tests.tools.plan.profiles import MIB, gradient, link, profile

ONE = profile(gradient("w", 8, 0.1))  # 0.16 s alone, of which 0.01 in the optimizer
BYTES = 8 * MIB


def flat(world_size: int, network: Link | None = None) -> Cluster:
    network = network or link()
    return Cluster(world_size, 1, network, network)


def all_reduce(
    num_bytes: float, world_size: int, alpha_us: float = 50, gbytes: float = 1.0
) -> float:
    return 2 * (world_size - 1) * (alpha_us * 1e-6 + num_bytes / (world_size * gbytes * 1e9))


@pytest.mark.parametrize(
    ("exchange", "exposed"),
    [
        (local_sgd(4), all_reduce(BYTES, 3, gbytes=0.01) / 4),
        (local_sgd(4, num_states=2), 3 * all_reduce(BYTES, 3, gbytes=0.01) / 4),
        (diloco(10), all_reduce(BYTES, 3, gbytes=0.01) / 10),
        (diloco(10, 2), 2 * all_reduce(BYTES / 2, 3, gbytes=0.01) / 10),
        (diloco(10, 2, 3), 2 * (all_reduce(BYTES / 2, 3, gbytes=0.01) - 3 * 0.16) / 10),
        (diloco(10, 2, 9), 0),
        (diloco(10, outer_bits=8), all_reduce(BYTES * (1 + 4 / 256) / 4, 3, gbytes=0.01) / 10),
        (diloco(10, outer_bits=4), all_reduce(BYTES * (1 / 2 + 4 / 256) / 4, 3, gbytes=0.01) / 10),
        (gossip("pairs"), BYTES / 0.01e9 + 2 * 50e-6 - 0.15),
        (gossip("ring"), 2 * BYTES / 0.01e9 + 2 * 50e-6 - 0.15),
        # an optimizer's step takes 0.01
        (parameter_server(), 2 * (2 / 3 * BYTES / 0.01e9 + 50e-6) - 0.01 * 2 / 3),
        (parameter_server(1), 2 * (2 * BYTES / 0.01e9 + 50e-6)),
        (parameter_server(1, "async"), 2 * (2 * BYTES / 0.01e9 + 50e-6) + 0.01 * 2),
    ],
)
def test_exchanges_cost_what_is_not_hidden_under_computation(
    exchange: Exchange, exposed: float
) -> None:
    step = predict_exchange(ONE, flat(3, link(50, 0.01)), Settings(), exchange)
    assert step.exposed == pytest.approx(exposed)
    assert step.seconds == pytest.approx(0.16 + exposed)
    assert predict_exchange(ONE, flat(1), Settings(), exchange).seconds == pytest.approx(0.16)


@pytest.mark.parametrize(("world_size", "askers"), [(4, 1), (5, 3 / 2)])
def test_asynchronous_gossip_without_a_wait_costs_the_work_of_the_averages_that_a_wire_lets_through(
    world_size: int, askers: float
) -> None:
    """Of an odd number of ranks some are asked more often. Answers come a part later."""
    cluster, never = flat(world_size, link(50, 0.01)), asynchronous_gossip(None)
    took = (1 + 1 / num_gossip_parts(BYTES)) * askers * BYTES / 0.01e9 + 2 * 50e-6
    busy = replace(ONE, processor=1e-9)
    work = 1e-9 * askers * BYTES * world_size / (2 * (world_size - 1))
    for one, working in ((ONE, 0.0), (busy, work)):
        step = predict_exchange(one, cluster, Settings(), never)
        assert step.seconds == pytest.approx(0.16 + working * step.seconds / took)
        sent = sent_bytes(one, cluster, Settings(), never)
        assert sent == pytest.approx(askers * BYTES * step.seconds / took)
    fast = predict_exchange(busy, flat(world_size), Settings(), never)  # an average a step
    assert fast.seconds == pytest.approx(0.16 + work)
    assert sent_bytes(busy, flat(world_size), Settings(), never) == pytest.approx(askers * BYTES)


@pytest.mark.parametrize(("world_size", "even"), [(4, 1 / 2), (5, 3 / 5)])
@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_even_ranks_of_asynchronous_gossip_wait_for_averages(
    world_size: int, even: float, overlap: int
) -> None:
    """The odd ones go on: in the time of a step of all ranks they take more than one."""
    exchange, slow = asynchronous_gossip(overlap), link(50, 0.01)
    askers = even / (1 - even)
    took = (1 + 1 / num_gossip_parts(BYTES)) * askers * BYTES / 0.01e9 + 2 * 50e-6
    whole = 0.16 * (overlap + 1)
    for bandwidth in (0.01, 1.0):
        step = predict_exchange(ONE, flat(world_size, link(50, bandwidth)), Settings(), exchange)
        assert step.seconds == pytest.approx(0.16) if bandwidth == 1.0 else step.seconds > 0.16
    waits = max(0.0, took - whole)
    assert waits > 0, "the link is not slow enough for what is tested"
    waiting = (whole + waits) / (overlap + 1)
    step = predict_exchange(ONE, flat(world_size, slow), Settings(), exchange)
    assert step.seconds == pytest.approx(1 / (even / waiting + (1 - even) / 0.16))
    sent = sent_bytes(ONE, flat(world_size, slow), Settings(), exchange)
    assert sent == pytest.approx(askers * BYTES * step.seconds / (whole + waits))
    busy = replace(ONE, processor=1e-9)
    work = 1e-9 * askers * BYTES * world_size / (2 * (world_size - 1))
    assert predict_exchange(busy, flat(world_size), Settings(), exchange).seconds == pytest.approx(
        0.16 + work
    )


def test_a_collective_that_was_measured_wrongly_does_not_set_what_a_message_costs() -> None:
    """As an all-gather once was: 276 Mbit/s over a link of 100."""
    slow = link(50, 0.01)
    disturbed = replace(slow, costs=dict(slow.costs) | {"all_gather": CostModel(0.0, 0.03e9)})
    for exchange in (asynchronous_gossip(), parameter_server(), gossip("pairs")):
        expected, found = (
            predict_exchange(ONE, flat(4, one), Settings(), exchange) for one in (slow, disturbed)
        )
        assert found.seconds == expected.seconds


@pytest.mark.parametrize("overlap", [0, 2, None])
def test_questions_cost_ranks_of_asynchronous_gossip_what_the_profile_measured(
    overlap: int | None,
) -> None:
    """Beside a batch the work of answers takes twice as long, and that is how long an exchange
    takes at least.
    """
    asks, answers, free = 0.004, 0.06, flat(2, Link.of("free", CostModel(0.0, math.inf)))
    known = replace(ONE, questions=Questions(asks / BYTES, answers / BYTES), copying=0.001 / BYTES)
    paces = predict_paces(known, free, Settings(), asynchronous_gossip(overlap))
    alone = 0.16 + 4 * 0.001
    assert paces.asking == pytest.approx(alone + asks)
    assert paces.answering == pytest.approx(alone / (1 - answers / (alone + asks)))
    busier = replace(known, questions=Questions(asks / BYTES, 0.1 / BYTES))
    paces = predict_paces(busier, free, Settings(), asynchronous_gossip(overlap))
    whole = 2 * 0.1 + 4 * 0.001
    assert paces.asking == pytest.approx(whole if overlap == 0 else alone * whole / (whole - asks))
    assert paces.answering == pytest.approx(alone / (1 - 0.1 / whole))


@pytest.mark.parametrize(
    ("exchange", "passes"),
    [
        (gossip("pairs"), 1 + 2 + 1 + 1),
        (gossip("ring"), 1 + 3 + 2 + 1),
        (parameter_server(), 2 + 1 + 4 / 3),
        (parameter_server(1), 2 + 3 + 4),
        (parameter_server(mode="async"), 2 + 1),
        (local_sgd(4), 0),
    ],
)
def test_copies_of_the_parameters_cost_what_the_profile_measured(
    exchange: Exchange, passes: float
) -> None:
    plain, copying = (
        predict_exchange(one, flat(3), Settings(), exchange)
        for one in (ONE, replace(ONE, copying=1e-9))
    )
    assert copying.seconds - plain.seconds == pytest.approx(passes * BYTES * 1e-9)


def test_hosts_of_several_ranks_share_a_link() -> None:
    """Of 8 ranks on 4 hosts 6 are elsewhere; 3 servers lie on 3 hosts."""
    numbers = (1000, 8, 2)
    sent = {written: exchange.traffic.sent_bytes(*numbers) for written, exchange in SERVED.items()}
    passing = {
        written: exchange.traffic.passing_bytes(*numbers) for written, exchange in SERVED.items()
    }
    assert sent == pytest.approx(
        {"all": 4000 * 2 * 2 * 6 / 8, "three": 4000 * (6 + 2 * 2) / 3, "one": 4000 * 6}
    )
    assert passing == pytest.approx(
        {"all": 2 * 4000 * 2 * 6 / 8, "three": 2 * 4000 * 6 / 3, "one": 2 * 4000 * 6}
    )
    apart, together = (
        sent_bytes(
            ONE,
            Cluster(8, per_node, link(0, 0.01), link(0, 5)),
            Settings(),
            asynchronous_gossip(None),
        )
        for per_node in (1, 4)
    )
    # in the time of an exchange
    assert together == pytest.approx(0.16 * 4 * BYTES / (2 * 2 * BYTES / 0.01e9))
    assert apart == pytest.approx(
        0.16 * BYTES / ((1 + 1 / num_gossip_parts(BYTES)) * BYTES / 0.01e9)
    )


SERVED: dict[str, Any] = {
    "all": parameter_server(),
    "three": parameter_server(3),
    "one": parameter_server(1),
}


def test_ranks_of_a_node_average_gradients_besides() -> None:
    cluster = Cluster(8, 2, link(50, 0.1), link(5, 5))
    apart, together = (
        predict_exchange(ONE, cluster, Settings(), local_sgd(4, in_nodes))
        for in_nodes in (False, True)
    )
    assert together.exposed - apart.exposed == pytest.approx(
        all_reduce(BYTES, 2, alpha_us=5, gbytes=5)
    )


def test_encoding_delays_backward_and_what_comes_after_it() -> None:
    one = replace(ONE, encoding={"int8": 2e-9})
    step = predict(one, flat(2), Settings(compression="int8"))
    coded = 2e-9 * BYTES / 4
    assert step.exposed == pytest.approx(coded + all_reduce(BYTES * (1 + 4 / 256) / 4, 2))
    assert predict(one, flat(2), Settings()).exposed == pytest.approx(all_reduce(BYTES, 2))


def test_cores_that_compute_cannot_hide_the_work_of_messages() -> None:
    free = Link.of("free", CostModel(0.0, float("inf")))
    busy = replace(ONE, processor=2e-9)
    assert predict(busy, flat(2, free), Settings()).exposed == pytest.approx(2e-9 * BYTES)
    assert predict_exchange(
        busy, flat(2, free), Settings(), diloco(5, overlap=4)
    ).exposed == pytest.approx(2e-9 * BYTES / 5)


@pytest.mark.parametrize(
    ("step", "calls"),
    [
        (lambda one, cluster: predict(one, cluster, Settings()), 1),
        (lambda one, cluster: predict(one, cluster, Settings(compression="bf16")), 1),
        (lambda one, cluster: predict(one, cluster, Settings(compression="int8")), 2),
        (lambda one, cluster: predict(one, cluster, Settings(compression="terngrad")), 3),
        (lambda one, cluster: predict(one, cluster, Settings(shard_optimizer=True)), 2),
        (lambda one, cluster: predict_exchange(one, cluster, Settings(), local_sgd(4)), 2 / 4),
        (
            lambda one, cluster: predict_exchange(one, cluster, Settings(), diloco(10, 2, 3, 4)),
            5 / 10,
        ),
        (
            lambda one, cluster: predict_exchange(
                one, cluster, Settings(), local_sgd(4, num_states=2)
            ),
            4 / 4,
        ),
        (lambda one, cluster: predict_exchange(one, cluster, Settings(), gossip("ring")), 2),
        (lambda one, cluster: predict_exchange(one, cluster, Settings(), parameter_server()), 2),
    ],
)
def test_calls_cost_what_the_profile_measured_among_ranks_that_compute(
    step: Any, calls: float
) -> None:
    """0.7 ms of the 3 ms are in the link's model of a short message."""
    recorded = Run(2, 2, "cpu", 16, 10)
    known = replace(
        ONE, run=recorded, link={"all_reduce": CostModel(350e-6 - 2048 / 1e9, 1e9)}, call=0.5e-3
    )
    cluster = flat(8, link(50, 0.01))  # so slow that it hides the work of all calls
    assert known.call_beside_link == 0
    slower = replace(known, call=3e-3)
    assert slower.call_beside_link == pytest.approx(2.3e-3)
    assert step(slower, cluster).exposed - step(known, cluster).exposed == pytest.approx(
        calls * 2.3e-3
    )
    assert replace(slower, link=None).call_beside_link == 0


@pytest.mark.parametrize(
    ("compression", "calls"),
    [(None, 1), ("bf16", 1), ("int8", 3), ("terngrad", 4), ("topk", 2), ("powersgd", 3)],
)
def test_cores_that_compute_hide_no_call_of_any_bucket(compression: str | None, calls: int) -> None:
    """Nor that of its flags, where they do not travel with the gradients."""
    gradients = tuple(
        replace(ONE.gradients[0], name=name, ready=0.05 * at)
        for at, name in enumerate(("one", "two"))
    )
    one = replace(
        ONE,
        gradients=gradients,
        run=Run(2, 2, "cpu", 16, 10),
        link={"all_reduce": CostModel(350e-6, 1e12)},
    )
    settings = Settings(compression=compression, bucket_cap_mb=1e-3)
    cluster = flat(2, Link.of("free", CostModel(0.0, float("inf"))))
    assert predict(replace(one, call=3e-3), cluster, settings).exposed == pytest.approx(
        2 * calls * 3e-3
    )


def test_cores_that_compute_hide_no_message_behind_a_batch() -> None:
    computes = replace(ONE, call=0.0)
    for exchange in (gossip("pairs"), gossip("ring")):
        sent = 2 * 50e-6 + exchange.traffic.passing_bytes(BYTES // 4, 2, 1) / 1e9
        assert predict_exchange(ONE, flat(2), Settings(), exchange).exposed == pytest.approx(0)
        assert predict_exchange(computes, flat(2), Settings(), exchange).exposed == pytest.approx(
            sent
        )


def test_a_limiter_that_lets_short_messages_pass_at_once_does_not_hide_the_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """256 KiB pass after a pause, as through tc's token bucket: the large ones, which come
    first, use them up.
    """
    left: dict[tuple[int, str], int] = {}

    def timed(comm: Any, collective: str, flat: Tensor, repeats: int, name: str) -> list[float]:
        seconds = []
        for _ in range(1 + repeats):
            at_once = min(left.setdefault((comm.rank, collective), 2**18), flat.nbytes)
            left[comm.rank, collective] -= at_once
            seconds.append(1e-3 + (flat.nbytes - at_once) / 1e7)
        return seconds[1:]

    monkeypatch.setattr(probing, "time_collective", timed)
    cost = run_ranks(
        2,
        lambda comm: probing.measure_collectives(comm, torch.device("cpu"), (2**16, 2**20, 2**22)),
    )[0]
    assert cost["all_gather"].bandwidth == pytest.approx(0.5e7, rel=0.01)
    assert cost["all_gather"].alpha_seconds == pytest.approx(1e-3, rel=0.05)


def test_outer_gradients_are_encoded() -> None:
    coding = replace(ONE, encoding={"4 bits": 20e-9, "int8": 2e-9})
    for bits, seconds in ((4, 20e-9), (8, 2e-9), (32, 0)):
        plain, coded = (
            predict_exchange(one, flat(2), Settings(), diloco(10, 2, 3, bits))
            for one in (ONE, coding)
        )
        assert plain.exposed == 0
        assert coded.exposed == pytest.approx(seconds * BYTES / 4 / 10)


@pytest.mark.parametrize("name", sorted(COMPRESSORS))
def test_rounds_are_those_of_the_collectives_of_an_average(name: str) -> None:
    comm = SilentCommunicator(2)
    compressor = COMPRESSORS[name].build(**({"warmup_steps": 0} if name == "dgc" else {}))
    flat_gradient = torch.randn(2**16).to(torch.bfloat16 if name == "fp32" else torch.float32)
    if name == "powersgd":
        compressor = PowerSGD(start_iter=0)
    if compressor.buffer_dtype is None:
        compressor.prepare(flat_gradient, OneGradient(flat_gradient.view(-1)))
    compressor.begin_backward()
    compressor.all_reduce(flat_gradient, comm, name="bucket").wait()
    assert len(comm.sent) == COMPRESSORS[name].rounds


@pytest.mark.parametrize("name", sorted(COMPRESSORS))
def test_a_bucket_takes_as_many_collectives_as_are_counted(name: str) -> None:
    comm, dtype = SilentCommunicator(2), torch.bfloat16 if name == "fp32" else torch.float32
    settings = {"dgc": {"warmup_steps": 0}, "powersgd": {"start_iter": 0}}.get(name, {})
    compressor = COMPRESSORS[name].build(**settings)
    weight = nn.Parameter(torch.zeros(256, 256, dtype=dtype))
    weight.grad = torch.randn(256, 256).to(dtype)
    bucket = Bucket(["weight"], [weight])
    prepare_compressed(bucket, compressor)
    compressor.begin_backward()
    bucket.begin()
    bucket.fill([True], stop=False)
    average_compressed_(bucket, compressor, comm, None, "bucket").wait()
    assert len(comm.sent) == COMPRESSORS[name].num_collectives


def test_the_gentlest_of_the_fast_ones_is_recommended() -> None:
    def best(gbytes: float) -> str:
        return recommended(choices(ONE, flat(2, link(50, gbytes)), Settings())).argument

    assert best(1000) == "no compression"
    assert best(0.4) == "compression='bf16'"  # others gain less than a tenth of it
    assert best(0.001) == "algorithm=DiLoCo(100, fragments=4, overlap=10, outer_bits=4)"
    names = [choice.argument for choice in choices(ONE, flat(2), Settings())]
    assert {f"compression={name!r}" for name in COMPRESSORS.keys() - {"fp32"}} < set(names)
    assert {f"algorithm={name}" for name in EXCHANGES} < set(names)


def test_what_is_listed_is_what_the_algorithms_say() -> None:
    made: dict[str, Any] = {
        each.__name__: each for each in (AsynchronousGossip, DiLoCo, Gossip, LocalSGD)
    }
    for written, listed in EXCHANGES.items():
        said = eval(written, made | {"ParameterServer": ParameterServer}).exchange()
        for world_size in (2, 3, 64):
            cluster = flat(world_size, link(50, 0.01))
            assert predict_exchange(ONE, cluster, Settings(), said) == predict_exchange(
                ONE, cluster, Settings(), listed
            )
            assert sent_bytes(ONE, cluster, Settings(), said) == sent_bytes(
                ONE, cluster, Settings(), listed
            )


NUM_STEPS = 12


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    "make",
    [
        lambda: LocalSGD(4),
        lambda: LocalSGD(4, average_optimizer=True),
        lambda: DiLoCo(4),
        lambda: DiLoCo(4, fragments=2, outer_bits=8),
        lambda: DiLoCo(3, outer_bits=4),
        lambda: Gossip("pairs"),
        lambda: Gossip("ring"),
        AsynchronousGossip,
        ParameterServer,
        lambda: ParameterServer(1),
        lambda: ParameterServer(1, "async"),
    ],
)
def test_algorithms_send_the_bytes_that_they_say(
    make: Callable[[], Algorithm], world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: Counter[int] = Counter()
    send = ThreadTransport.isend

    def counted(self: ThreadTransport, tensor: Tensor, dst: int, tag: int = 0) -> Any:
        sent[self.rank] += tensor.nbytes
        return send(self, tensor, dst, tag)

    monkeypatch.setattr(ThreadTransport, "isend", counted)

    def rank(comm: Any) -> None:
        torch.manual_seed(0)
        net, algorithm = (
            nn.Sequential(nn.Linear(128, 512, bias=False), nn.Linear(512, 128, bias=False)),
            make(),
        )
        # servers send it back at the end
        momentum = 0.9 if getattr(algorithm, "average_optimizer", False) else 0.0
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=momentum)
        algorithm.attach(net, [optimizer], comm)
        for _ in range(NUM_STEPS):
            algorithm.begin_batch()
            with algorithm.backward():
                net(torch.ones(1, 128)).sum().backward()
            algorithm.before_step(optimizer, has_closure=False)
            optimizer.step()
            algorithm.after_step(optimizer)
        algorithm.detach()

    run_ranks(world_size, rank)
    exchange = make().exchange()
    assert exchange is not None
    trained = profile(gradient("w", 4 * 2 * 128 * 512 / MIB, 0.1))
    expected = NUM_STEPS * sent_bytes(trained, flat(world_size), Settings(), exchange)
    # partners of asynchronous gossip are drawn: some rank is asked more often than the others
    found = sum(sent.values()) / world_size if make is AsynchronousGossip else max(sent.values())
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("shape", [(64, 32), (8, 6), (16, 8, 3, 3), (40,), (2, 3), (1, 50)])
def test_low_rank_bytes_are_those_of_its_messages(shape: Sequence[int]) -> None:
    compressor = PowerSGD(start_iter=0)
    flat_gradient = torch.zeros(torch.Size(shape).numel())

    class NoNames:
        names, views = ["w"], [flat_gradient.view(*shape)]
        contributed, used = [True], torch.ones(1)

    compressor.prepare(flat_gradient, NoNames())
    plan = compressor.compressor._plans[flat_gradient]  # type: ignore[attr-defined]
    shape_bytes = COMPRESSORS["powersgd"].shape_bytes
    assert shape_bytes is not None
    assert 4 * (plan.first.numel() + plan.second.numel()) == shape_bytes(
        shape, flat_gradient.numel()
    )
