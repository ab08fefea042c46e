"""Re-ranking against the paper's definitions, written out over sets and a whole matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from lightning_ring.retrieval import nearest, rerank


def points(num: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(6, (num,), generator=generator)
    centres = torch.randn(6, 10, generator=generator)
    noise = torch.randn(num, 10, generator=generator)
    return normalize(centres[labels] + 0.9 * noise).double(), labels


def by_definition(items: Tensor, k1: int, k2: int, weight: float) -> Tensor:
    """Final distances between all items: Zhong et al. 2017, equations 3 to 12."""
    num = len(items)
    plain = 2 - 2 * items @ items.T
    order = plain.argsort(dim=1)

    def reciprocal(item: int, k: int) -> set[int]:
        near = order[item, : k + 1].tolist()
        return {other for other in near if item in order[other, : k + 1].tolist()}

    encoded = torch.zeros(num, num, dtype=items.dtype)
    for item in range(num):
        own = reciprocal(item, k1)
        expanded = set(own)
        for other in own:
            half = reciprocal(other, max(1, round(k1 / 2)))
            if 3 * len(half & own) > 2 * len(half):
                expanded |= half
        members = sorted(expanded)
        encoded[item, members] = (-plain[item, members]).exp()
    encoded /= encoded.sum(1, keepdim=True)
    encoded = encoded[order[:, :k2]].mean(1)
    least = torch.minimum(encoded[:, None], encoded[None]).sum(2)
    most = torch.maximum(encoded[:, None], encoded[None]).sum(2)
    return (1 - weight) * (1 - least / most) + weight * plain


@pytest.mark.parametrize(("k1", "k2"), [(8, 3), (5, 1), (3, 2)])
def test_the_order_is_that_of_the_definition(k1: int, k2: int) -> None:
    items, _ = points(60)
    gallery, queries = items[:45], items[45:]
    expected = by_definition(items, k1, k2, 0.3)[45:, :45]
    found = rerank(queries, gallery, 20, k1=k1, k2=k2, candidates=45, chunk=4)
    torch.testing.assert_close(expected.gather(1, found), expected.sort(dim=1).values[:, :20])
    assert not torch.equal(found, nearest(queries, gallery, 20))


def test_a_query_of_the_gallery_counts_once_and_does_not_find_itself() -> None:
    items, _ = points(50)
    expected = by_definition(items, 8, 3, 0.3).fill_diagonal_(torch.inf)
    found = rerank(items[:9], items, 10, k1=8, k2=3, candidates=50, exclude=torch.arange(9))
    torch.testing.assert_close(expected[:9].gather(1, found), expected[:9].sort(dim=1).values[:, :10])


def test_it_finds_more_of_a_class_than_distances_alone() -> None:
    items, labels = points(300)
    queries = torch.arange(300)
    plain = labels[nearest(items, items, 20, exclude=queries)] == labels[:, None]
    again = labels[rerank(items, items, 20, exclude=queries)] == labels[:, None]
    assert again.double().mean() > plain.double().mean() + 0.02


def test_the_plain_distance_alone_keeps_the_order_and_few_items_are_no_trouble() -> None:
    items, _ = points(30)
    queries = torch.arange(30)
    assert torch.equal(rerank(items, items, 5, weight=1.0, exclude=queries), nearest(items, items, 5, exclude=queries))
    assert rerank(items[:1], items[:2], 5).shape == (1, 2)
    assert rerank(items[:0], items, 5).shape == (0, 5)


def test_more_copies_of_an_item_than_neighbours_are_compared_stay_together() -> None:
    items, _ = points(40)
    gallery = torch.cat([items[:10], items[:1].expand(30, -1)])  # the item 0 is there 31 times
    copies = {0, *range(10, 40)}
    found = rerank(items[:1], gallery, 31, k1=8, k2=3, candidates=40, exclude=torch.tensor([-1]))
    assert set(found[0].tolist()) == copies
    others = rerank(items[:1], gallery, 40, k1=8, k2=3, candidates=40, exclude=torch.tensor([0]))
    assert set(others[0, :30].tolist()) == copies - {0}
    assert others[0, -1] == -1  # it does not find itself, and nothing else is left


@pytest.mark.parametrize("change", [{"k1": 2, "k2": 3}, {"weight": 1.5}, {"candidates": 3}, {"k2": 0}])
def test_bad_input_is_one_clear_error(change: dict) -> None:
    items, _ = points(20)
    with pytest.raises(ValueError, match="rerank expects 1 <= k2 <= k1"):
        rerank(items, items, 5, **change)
