"""The pictures in TensorBoard, and that they show what is so."""

import pytest
import torch

from recipes.pictures import confusion, strips


def test_confusion_has_class_names_and_shares_of_each_class():
    labels, predicted = torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([0, 1, 1, 1, 1, 2])
    (axes,) = confusion(predicted, labels, ["cat", "owl", "newt"], "val").axes
    assert axes.get_title() == "val"
    for ticks in (axes.get_xticklabels(), axes.get_yticklabels()):
        assert [tick.get_text() for tick in ticks] == ["cat", "owl", "newt"]
    assert axes.images[0].get_array().tolist() == [[0.5, 0.5, 0], [0, 1, 0], [0, 0, 1]]
    assert len(axes.texts) == 9


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
