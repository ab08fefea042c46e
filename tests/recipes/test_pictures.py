"""The pictures in TensorBoard, and that they show what is so."""

from __future__ import annotations

import pytest
import torch

from recipes.pictures import confusion, framed, shown, strips


def test_images_are_stretched_to_what_a_screen_shows():
    images = torch.randn(4, 3, 8, 8) * torch.tensor([1.0, 5.0, 0.1, 0.0]).view(4, 1, 1, 1)
    stretched = shown(images)
    assert (stretched.amin((1, 2, 3))[:3] == 0).all()
    assert (stretched.amax((1, 2, 3))[:3] == 1).all()
    assert torch.isfinite(stretched).all()


def test_confusion_has_class_names_and_shares_of_each_class():
    labels, predicted = torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([0, 1, 1, 1, 1, 2])
    (axes,) = confusion(predicted, labels, ["cat", "owl", "newt"], "val").axes
    assert axes.get_title() == "val"
    for ticks in (axes.get_xticklabels(), axes.get_yticklabels()):
        assert [tick.get_text() for tick in ticks] == ["cat", "owl", "newt"]
    assert axes.images[0].get_array().tolist() == [[0.5, 0.5, 0], [0, 1, 0], [0, 0, 1]]
    assert len(axes.texts) == 9


def test_confusion_of_many_classes_has_no_numbers_and_names_that_can_be_read():
    labels = torch.arange(110)
    (axes,) = confusion(labels, labels, [f"plant {label}" for label in range(110)]).axes
    assert not axes.texts
    named = [tick.get_text() for tick in axes.get_yticklabels()]
    assert named[:4] == ["plant 0", "", "", "plant 3"]


def test_strips_frame_right_ones_green_and_others_red():
    embeddings = torch.tensor([[1.0, 0.0], [0.99, 0.1], [0.0, 1.0], [0.1, 0.99]])
    labels = torch.tensor([7, 7, 7, 8])
    picture = strips(torch.zeros(4, 3, 4, 4), labels, embeddings, num=4, k=1)
    cell = 4 + 6 + 3  # image, frames, padding
    frames = [
        [tuple(picture[:, 4 + row * cell, 4 + column * cell].tolist()) for column in (0, 1)]
        for row in range(4)
    ]
    assert [row[0] for row in frames] == [(1.0, 1.0, 1.0)] * 4
    green, red = pytest.approx((0, 0.8, 0)), pytest.approx((0.9, 0, 0))
    # 2 and 3 are nearest to each other, of two classes
    assert [row[1] for row in frames] == [green, green, red, red]


def test_grey_images_get_frames_too():
    assert framed(torch.zeros(1, 4, 4), (0, 1, 0)).shape == (3, 10, 10)
