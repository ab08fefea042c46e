"""The model of a step, beside closed forms."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_ring.comm.cost import CostModel, num_nested_pieces
from lightning_ring.gradients.bucket import plan_buckets
from lightning_ring.tools.plan.inputs import NETWORKS, Run
from lightning_ring.tools.plan.model import (
    Cluster,
    Link,
    Settings,
    cut_buckets,
    predict,
    world_sizes,
)
from lightning_ring.tools.plan.report import AS_IT_IS, advice, changes, tabulate
from tests.tools.plan.profiles import MIB, gradient, link, profile, several

ONE = profile(gradient("w", 8, 0.1), data=0.004, other=0.006)


def flat(world_size, network=None):
    network = network or link()
    return Cluster(world_size, 1, network, network)


def ring(passes, size, mib, alpha_us=50, gbytes=1.0):
    """Seconds of one collective; by default over `link`."""
    return passes * (size - 1) * (alpha_us * 1e-6 + mib * MIB / (size * gbytes * 1e9))


@pytest.mark.parametrize("settings", [Settings(), Settings(sharded=True)])
def test_one_rank_takes_what_was_recorded(settings):
    step = predict(ONE, flat(1), settings)
    assert step.seconds == pytest.approx(0.17)
    assert (step.exposed, step.efficiency) == (0, 1)


def test_a_link_that_costs_nothing_hides_everything():
    free = Link.of("free", CostModel(0.0, float("inf")))
    assert predict(ONE, Cluster(64, 8, free, free), Settings()).seconds == pytest.approx(0.17)
    sharded = predict(ONE, flat(64, free), Settings(sharded=True))
    assert sharded.seconds == pytest.approx(0.16 + 0.01 / 64)  # the optimizer steps 1/64


@pytest.mark.parametrize(
    ("device", "world_size", "cap"), [("cpu", 16, 4), ("cpu", 17, 25), ("cuda", 2, 25)]
)
def test_buckets_have_their_default_size_at_each_number_of_ranks(device, world_size, cap):
    gradients = [gradient(str(number), 3, 0.1) for number in range(12)]
    found = profile(*gradients, run=Run(1, 1, device, 10, "Net", 1000))
    step = predict(found, flat(world_size), Settings())
    for other in (4, 25):
        same = predict(found, flat(world_size), Settings(bucket_cap_mb=other)) == step
        assert same == (other == cap)


@pytest.mark.parametrize("world_size", [2, 3, 64, 10_000])
def test_one_bucket_that_ends_backward_is_exposed_in_whole(world_size):
    step = predict(ONE, flat(world_size), Settings())
    whole = ring(2, world_size, 8)
    assert step.exposed == pytest.approx(whole)
    assert step.seconds == pytest.approx(0.17 + whole)
    assert step.efficiency == pytest.approx(0.17 / (0.17 + whole))


def test_a_bucket_that_is_early_enough_is_hidden_and_one_that_is_not_shows_what_is_left():
    two = profile(gradient("late", 1, 0.01), gradient("head", 2**-10, 0.1))
    took, tail, settings = ring(2, 4, 1), ring(2, 4, 2**-10), Settings(bucket_cap_mb=1)
    step = predict(two, flat(4), settings)
    assert step.exposed == pytest.approx(tail)
    later = profile(gradient("late", 1, 0.1 - took / 2), gradient("head", 2**-10, 0.1))
    assert predict(later, flat(4), settings).exposed == pytest.approx(took / 2 + tail)


def test_sharded_halves_are_exposed_around_backward_and_forward():
    step = predict(ONE, flat(4, link(50, 0.2)), Settings(sharded=True))
    half, flags = ring(1, 4, 8, gbytes=0.2), ring(2, 4, 4 / MIB, gbytes=0.2)
    between = 0.004 + 0.006  # of which the all-gather makes use before forward needs the parameter
    assert step.exposed == pytest.approx(half + flags + half - between)
    assert step.seconds == pytest.approx(0.17 - 0.01 * 3 / 4 + step.exposed)


def test_forward_waits_for_the_parameter_that_it_needs_first_and_computes_while_others_arrive():
    # in forward `first` is needed at 0
    gradients = [gradient("last", 4, 0.05), gradient("first", 4, 0.1)]
    slow = link(0, 0.2)
    gather = 1 / 2 * 4 * MIB / 0.2e9  # 10.5 ms for each of two buckets
    step = predict(profile(*gradients), flat(2, slow), Settings(sharded=True, bucket_cap_mb=4))
    scattered = max(0.05 + gather, 0.1) + gather + 2 * 8 / (2 * 0.2e9)
    # `first` delays forward by its arrival; by the time `last` is needed (half of forward later) it
    # is there
    assert 2 * gather < gather + 0.025
    assert step.exposed == pytest.approx(scattered - 0.1 + gather)


@pytest.mark.parametrize(("mib", "pieces"), [(4, 1), (40, num_nested_pieces(40 * MIB, 2, 4))])
def test_pieces_pass_through_the_stages_of_nested_rings(mib, pieces):
    step = predict(
        profile(gradient("w", mib, 0.1)), Cluster(8, 2, link(50, 1), link(2, 10)), Settings()
    )
    inside = ring(1, 2, mib / pieces, 2, 10)
    across = ring(2, 4, mib / pieces)  # both ranks' halves, over one link
    assert (pieces > 1) == (mib > 4)
    assert step.exposed == pytest.approx(inside + pieces * across + inside)


@pytest.mark.parametrize("steps", [1, 8, 32])
def test_local_steps_share_an_all_reduce_of_the_parameters(steps):
    two = profile(gradient("a", 3, 0.05), gradient("b", 5, 0.1))
    step = predict(two, flat(4), Settings(local_steps=steps))
    assert step.exposed == pytest.approx(ring(2, 4, 8) / steps)
    assert step.seconds == pytest.approx(two.phases.alone + step.exposed)


@pytest.mark.parametrize("world_size", [32, 512])
def test_large_buckets_in_nested_rings_are_not_cut_into_pieces_that_cost_more_than_they_hide(
    world_size,
):
    network, settings = Link.of("10gbit", NETWORKS["10gbit"]), Settings(bucket_cap_mb=25)
    nested = Cluster(world_size, 4, network, link(10, 7))
    flat_ring = Cluster(world_size, 1, network, network)
    ways = (predict(profile(*several()), one, settings).seconds for one in (nested, flat_ring))
    assert next(ways) < next(ways)


def test_a_ring_of_gpus_over_nodes_pays_each_hop_on_its_own_link():
    network, node = link(50, 1), link(2, 10)
    found = replace(ONE, run=replace(ONE.run, device="cuda"))
    step = predict(found, Cluster(8, 2, network, node), Settings())
    latency = 3 * 50e-6 + 4 * 2e-6
    assert step.exposed == pytest.approx(2 * (latency + 7 / 8 * 8 * MIB / 1e9))
    inside = predict(ONE, Cluster(2, 2, network, node), Settings())
    assert inside.exposed == pytest.approx(ring(2, 2, 8, 2, 10))


@pytest.mark.parametrize("settings", [Settings(), Settings(sharded=True)])
def test_more_ranks_never_take_less_and_a_better_link_never_more(settings):
    uneven = profile(*several(), optimizer=0.0)
    clusters = [Cluster(size, 4, link(), link(5, 10)) for size in world_sizes(4)]
    seconds = [predict(uneven, cluster, settings).seconds for cluster in clusters]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 2 * seconds[0]
    links = [link(50, speed) for speed in (0.1, 0.5, 1, 2, 10)]
    times = [predict(uneven, flat(16, one), settings).seconds for one in links]
    assert times == sorted(times, reverse=True)
    assert times[0] > 2 * times[-1]


@pytest.mark.parametrize("cap", [1, 2.5, 25])
def test_buckets_are_those_of_the_reducer(cap):
    gradients = [*several(20), *(gradient(f"d{i}", 0.6, 0.03 * i, "float64") for i in range(4))]
    gradients.sort(key=lambda one: one.ready)
    params = [
        (one.name, nn.Parameter(torch.empty(one.numel, dtype=getattr(torch, one.dtype))))
        for one in gradients
    ]
    expected = [[name for name, _ in group] for group in plan_buckets(params, cap)]
    assert len(expected) > 2
    found = cut_buckets(gradients, cap, False)
    assert [[member.name for member in members] for members, _ in found] == expected


def test_sixteen_bits_halve_float32_and_nothing_else():
    dtypes = {"float32": 0.5, "bfloat16": 1, "float64": 1}
    gradients = [gradient(dtype, 1, 0.1, dtype) for dtype in dtypes]
    found = cut_buckets(gradients, 25, True)
    assert {members[0].name: num_bytes / MIB for members, num_bytes in found} == dtypes


def test_numbers_of_ranks_fill_nodes():
    assert world_sizes(1, 10) == [1, 2, 4, 8, 10]
    assert world_sizes(6, 30) == [1, 2, 4, 6, 12, 24, 30]
    assert world_sizes(1)[-2:] == [8192, 10_000]


@pytest.mark.parametrize("gbytes", [0.001, 0.2, 20.0])
@pytest.mark.parametrize("per_node", [1, 8])
def test_advice_is_what_the_table_says(gbytes, per_node):
    found = profile(*several(), data=0.001)
    cluster = Cluster(64, per_node, link(50, gbytes), link(2, 20))
    table = {way: step for way, (step,) in tabulate(found, [cluster]).items()}
    now, saves = table.pop(AS_IT_IS), changes(found, cluster)
    for way, step in table.items():
        assert dict(saves)[way] == pytest.approx(1 - step.seconds / now.seconds)
    assert [saved for _, saved in saves] == sorted((saved for _, saved in saves), reverse=True)
    said = " ".join(advice(now, saves, found.phases.data))
    assert said.startswith(f"on 64 ranks {now.exposed / now.seconds:.0%} of a step waits")
    for way, saved in saves:
        assert (f"{way} {saved:.0%}" in said) == (saved >= 0.01)
    alike = [pair for pair in saves if not pair[0].startswith(("compression", "LocalSGD"))]
    first, saved = alike[0]
    assert (f"what to change first: {first} ({saved:.0%}), which" in said) == (saved >= 0.01)


def test_advice_without_anything_to_gain_says_so():
    free = Link.of("free", CostModel(0.0, float("inf")))
    cluster, lazy = Cluster(64, 1, free, free), profile(*several(), optimizer=0.0, data=0.5)
    now = predict(lazy, cluster, Settings())
    nothing, waits = advice(now, changes(lazy, cluster), lazy.phases.data)
    assert "No change in this plan would save 1%" in nothing
    assert waits.startswith("77% of the step waits for data")
