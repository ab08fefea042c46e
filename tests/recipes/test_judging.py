"""What is reported of several sets of images."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recipes.recognition.judging import Ranks, judged

ALONE = Ranks(0, 1, lambda tensor: [tensor])


def items(classes: int, each: int, seed: int, noise: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(each) + 1000 * seed
    centres = torch.randn(classes, 8, generator=generator)
    embeddings = centres.repeat_interleave(each, 0) + noise * torch.randn(
        len(labels), 8, generator=generator
    )
    return embeddings, labels, torch.arange(len(labels)) + 10_000 * seed


def test_the_gallery_of_all_is_harder() -> None:
    found = judged({"test": items(120, 10, 1), "test_unseen": items(20, 20, 2)}, None, ALONE)
    assert found["test_unseen_in_all/R@1"] < found["test_unseen/R@1"]


def test_further_images_can_only_make_it_harder_and_ask_nothing() -> None:
    sets = {"test": items(20, 5, 1), "test_unseen": items(20, 5, 2)}
    further = items(20, 30, 1)[0], *items(20, 30, 3)[1:]  # near the seen classes, under other names
    found, harder = judged(sets, None, ALONE), judged(sets, further, ALONE)
    assert harder["test_in_all/R@1"] < found["test_in_all/R@1"]
    assert harder["test/R@1"] == found["test/R@1"]
    assert {name.split("/")[0] for name in harder} == {
        f"{name}{gallery}" for name in sets for gallery in ("", "_in_all")
    }


def test_one_set_has_one_gallery_and_sets_without_pairs_are_left_out_with_a_warning() -> None:
    assert {name.split("/")[0] for name in judged({"val": items(5, 4, 1)}, None, ALONE)} == {"val"}
    with pytest.warns(UserWarning, match="val/R@1, MAP@R and the like are left out"):
        assert judged({"val": items(5, 1, 1)}, None, ALONE) == {}
