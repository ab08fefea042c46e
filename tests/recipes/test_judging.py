"""Galleries of equal size, and what is reported of several sets of images."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recipes.recognition.judging import Ranks, _in_equal, judged
from tests.thread_ranks import run_ranks

ALONE = Ranks(0, 1, lambda tensor: [tensor])


def items(classes: int, each: int, seed: int, noise: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(each) + 1000 * seed
    centres = torch.randn(classes, 8, generator=generator)
    embeddings = centres.repeat_interleave(each, 0) + noise * torch.randn(
        len(labels), 8, generator=generator
    )
    return embeddings, labels, torch.arange(len(labels)) + 10_000 * seed


def test_seen_and_unseen_classes_of_one_difficulty_are_equal_only_in_galleries_of_one_size() -> (
    None
):
    sets = {"test": items(120, 10, 1), "test_unseen": items(20, 20, 2)}
    found = judged(sets, None, ALONE)
    # flattered: fewer classes to be mistaken for
    assert found["test_unseen/R@1"] > found["test/R@1"] + 0.1
    assert abs(found["test_unseen_equal/R@1"] - found["test_equal/R@1"]) < 0.06
    assert found["test_unseen_in_all/R@1"] < found["test_unseen/R@1"]


def test_galleries_of_equal_size_hold_as_many_classes_and_images_on_any_number_of_ranks(
    monkeypatch,
) -> None:
    seen: list[tuple[int, list[int]]] = []
    whole = items(30, 12, 1)

    def noted(
        self: Ranks, part: tuple[Tensor, Tensor, Tensor], gallery: object = None
    ) -> dict[str, float]:
        _, counts = self.rows(part[1]).unique(return_counts=True)
        seen.append((int(self.rows(part[2]).sum()), counts.tolist()))
        return {}

    monkeypatch.setattr(Ranks, "metrics", noted)
    _in_equal(whole, 7, 5, ALONE)
    assert all(counts == [5] * 7 for _, counts in seen)
    assert len({number for number, _ in seen}) == 5  # draws differ
    alone, seen[:] = sorted(seen), []

    def one(comm) -> None:
        mine = tuple(column[comm.rank :: 3] for column in whole)
        _in_equal(mine, 7, 5, Ranks(comm.rank, 3, comm.all_gather))

    run_ranks(3, one)
    assert sorted(seen) == sorted(alone * 3)


def test_further_images_can_only_make_it_harder_and_ask_nothing() -> None:
    sets = {"test": items(20, 5, 1), "test_unseen": items(20, 5, 2)}
    further = items(20, 30, 1)[0], *items(20, 30, 3)[1:]  # near the seen classes, under other names
    found, harder = judged(sets, None, ALONE), judged(sets, further, ALONE)
    assert harder["test_in_all/R@1"] < found["test_in_all/R@1"]
    assert harder["test/R@1"] == found["test/R@1"]
    assert {name.split("/")[0] for name in harder} == {
        f"{name}{gallery}" for name in sets for gallery in ("", "_equal", "_in_all")
    }


def test_one_set_has_one_gallery_and_sets_without_pairs_are_left_out_with_a_warning() -> None:
    assert {name.split("/")[0] for name in judged({"val": items(5, 4, 1)}, None, ALONE)} == {"val"}
    with pytest.warns(UserWarning, match="val/R@1, MAP@R and the like are left out"):
        assert judged({"val": items(5, 1, 1)}, None, ALONE) == {}
