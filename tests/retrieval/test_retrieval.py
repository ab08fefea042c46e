"""Retrieval metrics against torchmetrics, pytorch-metric-learning and by hand."""

from __future__ import annotations

import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from torch import Tensor
from torch.nn.functional import normalize
from torchmetrics.retrieval import RetrievalHitRate

from lightning_ring.retrieval import RetrievalMetrics, gather_rows, nearest, retrieval_metrics
from tests.thread_ranks import run_ranks


def items(num: int = 200, num_classes: int = 17, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(num_classes, (num,), generator=generator) * 5 - 20  # classes need not be 0, 1, 2 ...
    centres = torch.randn(5 * num_classes + 40, 8, generator=generator)
    return centres[labels] + 1.5 * torch.randn(num, 8, generator=generator), labels, torch.arange(num)


def measured(num_ranks: int, parts: list[tuple[Tensor, Tensor, Tensor]], **arguments: object) -> RetrievalMetrics:
    def one(comm) -> RetrievalMetrics:
        return retrieval_metrics(
            *parts[comm.rank], rank=comm.rank, world_size=num_ranks, all_gather=comm.all_gather, **arguments
        )

    results = run_ranks(num_ranks, one)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("chunk", [1, 7, 1024])
def test_rates_equal_those_of_two_other_libraries(chunk: int) -> None:
    embeddings, labels, indices = items()
    metrics = retrieval_metrics(embeddings, labels, indices, ks=(1, 4, 50), chunk=chunk)

    unit = normalize(embeddings)
    similarity = (unit @ unit.T).fill_diagonal_(-2)
    query = torch.arange(len(labels))[:, None].expand_as(similarity)
    relevant = labels[:, None] == labels[None, :]
    others = ~torch.eye(len(labels), dtype=torch.bool)
    for k in (1, 4, 50):
        reference = RetrievalHitRate(top_k=k)(similarity[others], relevant[others], indexes=query[others])
        assert metrics.hit_rate[k] == pytest.approx(reference.item(), abs=1e-6)
    calculator = AccuracyCalculator(
        include=("precision_at_1", "mean_average_precision_at_r"),
        k="max_bin_count",
        knn_func=CustomKNN(CosineSimilarity()),
        device=torch.device("cpu"),
    )
    reference = calculator.get_accuracy(embeddings, labels)
    assert metrics.map_at_r == pytest.approx(reference["mean_average_precision_at_r"], abs=1e-6)
    assert metrics.hit_rate[1] == pytest.approx(reference["precision_at_1"], abs=1e-6)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_with_uneven_parts_and_padding_agree_with_one_process(num_ranks: int) -> None:
    embeddings, labels, indices = items(101)
    alone = retrieval_metrics(embeddings, labels, indices)
    parts = [torch.arange(rank, 101, num_ranks) for rank in range(num_ranks)]
    parts[-1] = torch.cat([parts[-1], parts[0][:5]])  # as a sampler pads
    spread = measured(num_ranks, [(embeddings[part], labels[part], indices[part]) for part in parts], chunk=8)
    assert spread.num_duplicates == 5
    assert spread.num_queries == alone.num_queries
    assert spread.hit_rate == pytest.approx(alone.hit_rate)
    assert spread.map_at_r == pytest.approx(alone.map_at_r)


def test_an_item_does_not_find_itself_nor_its_padded_copy() -> None:
    embeddings = torch.eye(4)  # nothing is similar to anything: only an item itself would be
    labels = torch.tensor([0, 0, 1, 1])
    assert retrieval_metrics(embeddings, labels, torch.arange(4), ks=(3,)).hit_rate == {3: 1.0}
    twice = retrieval_metrics(embeddings.repeat(2, 1), labels.repeat(2), torch.arange(4).repeat(2), ks=(1,))
    assert twice.num_duplicates == 4
    assert twice.num_queries == 4
    assert twice.hit_rate[1] < 1


def test_items_without_another_of_their_class_ask_nothing_but_can_be_found_wrongly() -> None:
    embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [1.0, 0.1]])
    metrics = retrieval_metrics(embeddings, torch.tensor([0, 0, 1]), torch.arange(3), ks=(1, 2))
    assert metrics.num_queries == 2
    assert metrics.num_without_match == 1
    assert metrics.hit_rate == {1: 0.0, 2: 1.0}  # the single one of class 1 is nearest to both
    assert metrics.as_dict() == {"R@1": 0.0, "R@2": 1.0, "MAP@R": 0.0}


def test_average_precision_by_hand() -> None:
    angles = torch.tensor([0.0, 10.0, 25.0, 45.0]).deg2rad()
    embeddings = torch.stack([angles.cos(), angles.sin()], dim=1)
    metrics = retrieval_metrics(embeddings, torch.tensor([0, 1, 0, 0]), torch.arange(4), ks=(1, 2))
    # R is 2. The nearest two are wrong, right for 0 and for 25 degrees: (1/2) / 2; right, wrong for 45: (1/1) / 2
    assert metrics.map_at_r == pytest.approx((0.25 + 0.25 + 0.5) / 3)
    assert metrics.hit_rate == {1: pytest.approx(1 / 3), 2: 1.0}
    assert nearest(embeddings[:1], embeddings, 3, exclude=torch.tensor([0])).tolist() == [[1, 2, 3]]


def test_rows_of_any_shape_are_gathered() -> None:
    parts = [torch.arange(n * 6).reshape(n, 2, 3) + 100 * n for n in (2, 0, 3)]
    for gathered in run_ranks(3, lambda comm: gather_rows(parts[comm.rank], comm.all_gather)):
        assert torch.equal(gathered, torch.cat(parts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(3, dtype=torch.long)}, r"expects embeddings \(n, d\)"),
        ({"indices": torch.zeros(2, 2)}, r"expects embeddings \(n, d\)"),
        ({"ks": ()}, "at least 1"),
        ({"ks": (0,)}, "at least 1"),
        ({"world_size": 2}, "needs all_gather"),
        ({"embeddings": torch.full((5, 2), torch.nan)}, "NaN or infinite"),
        ({"labels": torch.arange(5)}, "no two share a class"),
    ],
)
def test_bad_input_is_one_clear_error(change: dict, message: str) -> None:
    good = {"embeddings": torch.randn(5, 2), "labels": torch.tensor([0, 0, 1, 1, 1]), "indices": torch.arange(5)}
    retrieval_metrics(**good)
    with pytest.raises(ValueError, match=message):
        retrieval_metrics(**{**good, **change})
