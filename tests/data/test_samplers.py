"""Samplers: orders by position, shared over ranks, kept over changes of their number."""

import itertools

import numpy as np
import pytest
from torch.utils.data import DataLoader

from lightning_ring.data import BalancedSampler, MixtureSampler, PKSampler, ShuffledSampler
from lightning_ring.data.sampling.counters import Stream, permute, philox, subkey, uniforms
from tests.refusals import refused

# 101 samples; class 5 has one
LABELS = np.repeat([0, 1, 2, 5, 7, 9, 70_000], [3, 50, 7, 1, 20, 4, 16])


def shuffled(rank, world_size, **kwargs):
    return ShuffledSampler(101, rank=rank, world_size=world_size, **kwargs)


def balanced(rank, world_size, **kwargs):
    return BalancedSampler(
        LABELS, beta=0.5, num_samples=600, rank=rank, world_size=world_size, **kwargs
    )


def mixed(rank, world_size, **kwargs):
    return MixtureSampler(
        [50, 7, 44], [1.0, 2.5, 0.5], num_samples=600, rank=rank, world_size=world_size, **kwargs
    )


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_numbers(counter, key, expected):
    words = [np.array([word], dtype=np.uint64) for word in (*counter, *key)]
    assert tuple(int(word[0]) for word in philox(tuple(words[:4]), tuple(words[4:]))) == expected


def test_uniforms_depend_on_seed_stream_epoch_and_position_only():
    whole = uniforms(3, Stream.CROP, 1, np.arange(1000), 5)
    assert whole.shape == (1000, 5)
    assert ((whole >= 0) & (whole < 1)).all()
    assert abs(whole.mean() - 0.5) < 0.02
    assert np.array_equal(whole[[7, 3]], uniforms(3, Stream.CROP, 1, [7, 3], 5))
    for other in ((4, Stream.CROP, 1), (3, Stream.COLOR, 1), (3, Stream.CROP, 2)):
        assert not np.isin(uniforms(*other, np.arange(1000), 5), whole).any()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 19, 1024, 1025, 70_001])
def test_permute_is_a_permutation(size):
    assert np.array_equal(
        np.sort(permute(np.arange(size), size, subkey(1, Stream.ORDER))), np.arange(size)
    )


@pytest.mark.parametrize("size", [3, 10])
def test_every_place_of_a_permutation_is_equally_likely(size):
    num = 4000
    keys = subkey(0, Stream.ORDER, np.repeat(np.arange(num), size))
    drawn = permute(np.tile(np.arange(size), num), size, keys).reshape(num, size)
    for first, second in ((0, 1), (1, size - 1)):
        pairs = drawn[:, first] * size + drawn[:, second]
        counts = np.bincount(pairs, minlength=size * size).reshape(size, size)
        assert counts.trace() == 0
        expected = num / (size * (size - 1))
        chi2 = ((counts - expected) ** 2 / expected)[~np.eye(size, dtype=bool)].sum()
        free = size * (size - 1) - 1
        assert chi2 < free + 5 * np.sqrt(2 * free)


@pytest.mark.parametrize("make", [shuffled, balanced, mixed])
@pytest.mark.parametrize(("world_size", "batch_size"), [(2, 6), (3, 4), (4, 3), (1, 12)])
def test_the_number_of_ranks_does_not_change_what_a_step_takes(make, world_size, batch_size):
    order = list(make(0, 1))
    shares = [list(make(rank, world_size)) for rank in range(world_size)]
    for step in range(8):
        batch = slice(step * batch_size, (step + 1) * batch_size)
        taken = itertools.chain(*(share[batch] for share in shares))
        assert sorted(taken) == sorted(order[step * 12 : (step + 1) * 12])


@pytest.mark.parametrize("make", [shuffled, balanced, mixed])
def test_it_goes_on_with_the_same_order_on_another_number_of_ranks(make):
    order = list(make(0, 1, seed=4))
    sampler = make(1, 2, seed=4)
    assert list(itertools.islice(sampler, 10)) == order[1:20:2]
    state = sampler.state_dict(trained=10)
    assert state == make(0, 2, seed=4).state_dict(trained=10)
    shares = []
    for rank in range(3):
        resumed = make(rank, 3)
        resumed.load_state_dict(state)
        shares.append(list(resumed))
        assert len(resumed) == len(make(rank, 3))  # the next epoch is whole
    rest = list(itertools.chain(*zip(*shares, strict=True)))
    length = len(order)
    assert rest[: length - 20] == order[20 : 20 + len(rest)]


@pytest.mark.parametrize(
    ("remainder", "sizes"), [("repeat", [26] * 4), ("drop", [25] * 4), ("keep", [26, 25, 25, 25])]
)
def test_remainder(remainder, sizes):
    shares = [list(shuffled(rank, 4, remainder=remainder, shuffle=False)) for rank in range(4)]
    assert [len(share) for share in shares] == sizes
    assert [len(shuffled(rank, 4, remainder=remainder)) for rank in range(4)] == sizes
    taken = np.bincount(list(itertools.chain(*shares)), minlength=101)
    assert {"repeat": (1, 2), "drop": (0, 1), "keep": (1, 1)}[remainder] == (
        taken.min(),
        taken.max(),
    )
    assert shares[1][:3] == [1, 5, 9]


def test_epochs_and_seeds_have_orders_of_their_own_and_workers_do_not():
    sampler = shuffled(0, 1)
    first = list(sampler)
    assert sorted(first) == list(range(101))
    assert list(sampler) == first
    loader = DataLoader(range(101), batch_size=8, sampler=sampler, num_workers=2)
    assert list(itertools.chain(*(batch.tolist() for batch in loader))) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(shuffled(0, 1, seed=1)) != first


@pytest.mark.parametrize("beta", [0, 0.5, 1])
def test_balanced_shares(beta):
    sampler = BalancedSampler(LABELS, beta=beta, num_samples=7000)
    drawn = np.bincount(LABELS[list(sampler)])
    drawn = drawn[drawn > 0]
    counts = np.bincount(LABELS)
    weights = counts[counts > 0] ** (1.0 - beta)
    assert np.abs(drawn - 7000 * weights / weights.sum()).max() <= 1


@pytest.mark.parametrize("num_samples", [150, 70_000])  # the second takes two rounds an epoch
def test_a_class_is_used_up_before_one_of_its_samples_comes_again(num_samples):
    sampler = BalancedSampler(LABELS, num_samples=num_samples)
    drawn = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        drawn += list(sampler)
    stream = np.array(drawn)
    for number, count in zip(*np.unique(LABELS, return_counts=True), strict=True):
        mine = stream[LABELS[stream] == number]
        cycles = mine[: len(mine) // count * count].reshape(-1, count)
        assert (np.sort(cycles, axis=1) == np.flatnonzero(number == LABELS)).all()
        if count > 3 and len(cycles) > 1:
            assert len({tuple(cycle) for cycle in cycles}) > 1  # in another order


def pk(rank, world_size):
    return PKSampler(LABELS, 2, 4, rank=rank, world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_pk_steps_have_distinct_classes_and_k_of_each(world_size):
    samplers = [pk(rank, world_size) for rank in range(world_size)]
    seen = np.zeros(len(LABELS), dtype=int)
    for epoch in range(24):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        shares = [np.array(list(sampler)).reshape(-1, 2, 4) for sampler in samplers]
        assert len(shares[0]) * 8 == len(samplers[0]) > 0
        for step in zip(*shares, strict=True):
            groups = np.concatenate(step)
            labels = LABELS[groups]
            assert (labels == labels[:, :1]).all()
            assert len(set(labels[:, 0])) == 2 * world_size
            for group in groups:
                assert len(set(group)) == min(4, (LABELS[group[0]] == LABELS).sum())
            np.add.at(seen, groups.reshape(-1), 1)
    assert (seen > 0).all()  # 50 images of class 1, 24 epochs of 3 or 4 passes
    of_class = {number: seen[number == LABELS].sum() for number in set(LABELS)}
    assert max(of_class.values()) <= 1.3 * min(of_class.values())


def test_pk_goes_on_on_another_number_of_ranks():
    labels = np.repeat(np.arange(12), 6)

    def make(rank, world_size):
        return PKSampler(labels, 2, 3, rank=rank, world_size=world_size)

    # 12 classes divide by 2, 4 and 6: nothing is skipped
    groups = np.array(list(make(0, 1))).reshape(-1, 3)
    state = make(1, 2).state_dict(trained=2 * 6)
    assert state["position"] == 2 * 4 * 3
    taken = []
    for rank in range(3):
        sampler = make(rank, 3)
        sampler.load_state_dict(state)
        taken.append(np.array(list(sampler)).reshape(-1, 2, 3))
    first = {tuple(group) for share in taken for group in share[0]}
    # 8 of 12 classes were taken: 6 do not fit in
    assert first == {tuple(group) for group in groups[12:18]}
    for step in zip(*taken, strict=True):
        assert len(set(labels[np.concatenate(step)[:, 0]])) == 6


@pytest.mark.parametrize(("classes", "width"), [(7, 4), (10, 6), (11, 4), (1, 1), (2, 2), (9, 5)])
def test_pk_leaves_no_class_out_of_two_passes(classes, width):
    sampler = PKSampler(np.repeat(np.arange(classes), 6), width, 2)
    assert sampler.num_passes == 3  # so that pairs of passes reach over epochs
    passes = []
    for epoch in range(16):
        sampler.set_epoch(epoch)
        drawn = (np.array(list(sampler)).reshape(3, -1, 2)[:, :, 0] // 6).tolist()
        assert all(len(set(one)) == len(one) == classes // width * width for one in drawn)
        passes += drawn
    for first, second in zip(passes[::2], passes[1::2], strict=True):
        assert set(first) | set(second) == set(range(classes))
    assert len({tuple(one) for one in passes}) > len(passes) // 2 or classes < 3


def test_too_few_classes_for_the_ranks_are_an_error():
    with refused(r"7 classes can be drawn from, but p=2 .* 4 ranks need 8"):
        pk(0, 4)


def test_a_state_of_something_else_is_refused(caplog):
    state = balanced(0, 1).state_dict()
    for other in (
        shuffled(0, 1),
        BalancedSampler(LABELS),
        BalancedSampler(LABELS[::-1].copy(), beta=0.5, num_samples=600),
    ):
        with refused("its position means nothing here"):
            other.load_state_dict(state)
    again = balanced(0, 1, seed=3)
    again.load_state_dict(state)
    assert "goes on with seed 0 of the saved run, not 3" in caplog.text
    assert list(again) == list(balanced(0, 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ShuffledSampler(0), "empty"),
        (lambda: ShuffledSampler(5, rank=2, world_size=2), "rank=2"),
        (lambda: ShuffledSampler(5, rank=1), "expected neither, or a rank"),
        (lambda: ShuffledSampler(5, remainder="some"), "remainder='some'"),
        (lambda: BalancedSampler([0, 1], beta=2), "beta=2"),
        (lambda: BalancedSampler([0.5, 1]), "float64"),
        (lambda: BalancedSampler([0, -1]), "label -1 of sample 1"),
        (lambda: PKSampler([0, 0], 1, 1), "k=1"),
    ],
)
def test_arguments_that_cannot_work(make, message):
    with refused(message):
        make()
