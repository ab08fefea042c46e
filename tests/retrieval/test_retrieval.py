"""Retrieval metrics against torchmetrics, pytorch-metric-learning and by hand."""

import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from torch.nn.functional import normalize
from torchmetrics.retrieval import RetrievalHitRate

from lightning_ring import retrieval
from lightning_ring.retrieval import gather_rows, retrieval_metrics, search
from tests.thread_ranks import run_ranks


def items(num=200):
    generator = torch.Generator().manual_seed(0)
    # classes need not be 0, 1, 2 ...
    labels = torch.randint(17, (num,), generator=generator) * 5 - 20
    centres = torch.randn(125, 8, generator=generator)
    return (
        centres[labels] + 1.5 * torch.randn(num, 8, generator=generator),
        labels,
        torch.arange(num),
    )


def measured(num_ranks, parts, galleries=None, **arguments):
    def one(comm):
        return retrieval_metrics(
            *parts[comm.rank],
            gallery=galleries and galleries[comm.rank],
            rank=comm.rank,
            all_gather=comm.all_gather,
            **arguments,
        )

    results = run_ranks(num_ranks, one)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("chunk", [1, 7, 1024])
def test_rates_equal_those_of_two_other_libraries(chunk, monkeypatch):
    monkeypatch.setattr(retrieval, "CHUNK", chunk)
    embeddings, labels, indices = items()
    metrics = retrieval_metrics(embeddings, labels, indices, ks=(1, 4, 50))

    unit = normalize(embeddings)
    similarity = (unit @ unit.T).fill_diagonal_(-2)
    query = torch.arange(len(labels))[:, None].expand_as(similarity)
    relevant = labels[:, None] == labels[None, :]
    others = ~torch.eye(len(labels), dtype=torch.bool)
    for k in (1, 4, 50):
        reference = RetrievalHitRate(top_k=k)(
            similarity[others], relevant[others], indexes=query[others]
        )
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


@pytest.mark.parametrize("block", [5, 8192])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_gallery_apart_is_spread_over_the_ranks_too(num_ranks, block, monkeypatch):
    monkeypatch.setattr(retrieval, "CHUNK", 7)
    monkeypatch.setattr(retrieval, "BLOCK", block)
    embeddings, labels, indices = items(120)
    # queries 30 to 49 are in it, and do not find themselves
    gallery = (embeddings[30:], labels[30:], indices[30:])
    alone = retrieval_metrics(
        embeddings[:50], labels[:50], indices[:50], gallery=gallery, ks=(1, 5, 200)
    )
    unit = normalize(embeddings)
    similarity = unit[:50] @ unit.T
    similarity[:, :30] = -2
    similarity[range(50), range(50)] = -2
    right = labels[similarity.argsort(dim=1, descending=True)] == labels[:50, None]
    same_class = labels[30:] == labels[:50, None]
    others = same_class & (indices[30:] != indices[:50, None])
    asking = others.any(1)
    assert alone.num_queries == int(asking.sum())
    assert alone.hit_rate[1] == pytest.approx(right[asking, 0].double().mean().item())
    precision = []
    for query in asking.nonzero().squeeze(1).tolist():
        r = int(others[query].sum())
        found = right[query, :r].double()
        precision.append(float((found.cumsum(0) / torch.arange(1, r + 1) * found).sum() / r))
    assert alone.map_at_r == pytest.approx(sum(precision) / len(precision))
    assert alone.hit_rate[200] == 1.0  # more than there are

    def parts(columns):
        return [tuple(column[r::num_ranks] for column in columns) for r in range(num_ranks)]

    asked = parts((embeddings[:50], labels[:50], indices[:50]))
    spread = measured(num_ranks, asked, parts(gallery), ks=(1, 5, 200))
    assert spread.as_dict() == pytest.approx(alone.as_dict())
    assert spread.num_queries == alone.num_queries


def test_a_rank_without_queries_or_without_gallery_takes_part(monkeypatch):
    monkeypatch.setattr(retrieval, "BLOCK", 16)
    embeddings, labels, indices = items(40)
    alone = retrieval_metrics(embeddings, labels, indices)
    parts = [slice(0, 0), slice(0, 40), slice(0, 0)]
    assert measured(3, [(embeddings[p], labels[p], indices[p]) for p in parts]) == alone


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_search_finds_what_a_whole_matrix_holds_and_gathers_blocks_alone(num_ranks, monkeypatch):
    monkeypatch.setattr(retrieval, "CHUNK", 9)
    monkeypatch.setattr(retrieval, "BLOCK", 20)
    unit = normalize(items(100)[0])
    whole = (unit @ unit.T).fill_diagonal_(-torch.inf)
    shares = torch.arange(100).split([10, 65, 25] if num_ranks == 3 else 100)

    def one(comm):
        mine, gathered = shares[comm.rank], []

        def all_gather(tensor):
            gathered.append(len(tensor))
            return comm.all_gather(tensor)

        found = search(
            unit[mine],
            unit[mine],
            12,
            exclude=mine,
            all_gather=all_gather if num_ranks > 1 else None,
        )
        assert max(gathered, default=0) <= 20
        return found

    results = run_ranks(num_ranks, one)
    similarity, places = (torch.cat(column) for column in zip(*results, strict=True))
    expected = whole.topk(12, dim=1)
    torch.testing.assert_close(similarity, expected.values)
    torch.testing.assert_close(whole.gather(1, places), expected.values)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_where_only_excluded_items_are_left_no_place_is_named(num_ranks):
    unit = torch.eye(3)

    def one(comm):
        mine = slice(comm.rank, None, num_ranks)
        return search(
            unit, unit[mine], 9, exclude=torch.tensor([1, -1, 2]), all_gather=comm.all_gather
        )

    for similarity, places in run_ranks(num_ranks, one):
        assert (places >= 0).sum(1).tolist() == [2, 3, 2]
        assert places[:, 2].tolist()[::2] == [-1, -1]
        assert similarity[:, 2].tolist()[::2] == [-torch.inf, -torch.inf]
        assert 1 not in places[0]
        assert 2 not in places[2]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_with_uneven_parts_and_padding_agree_with_one_process(num_ranks):
    embeddings, labels, indices = items(101)
    alone = retrieval_metrics(embeddings, labels, indices)
    parts = [torch.arange(rank, 101, num_ranks) for rank in range(num_ranks)]
    parts[-1] = torch.cat([parts[-1], parts[0][:5]])  # as a sampler pads
    spread = measured(
        num_ranks, [(embeddings[part], labels[part], indices[part]) for part in parts]
    )
    assert spread.num_duplicates == 5
    assert spread.num_queries == alone.num_queries
    assert spread.as_dict() == pytest.approx(alone.as_dict())


def test_an_item_does_not_find_itself_nor_its_padded_copy():
    embeddings = torch.eye(4)  # nothing is similar to anything: only an item itself would be
    labels = torch.tensor([0, 0, 1, 1])
    assert retrieval_metrics(embeddings, labels, torch.arange(4), ks=(3,)).hit_rate == {3: 1.0}
    twice = retrieval_metrics(
        embeddings.repeat(2, 1), labels.repeat(2), torch.arange(4).repeat(2), ks=(1,)
    )
    assert twice.num_duplicates == 4
    assert twice.num_queries == 4
    assert twice.hit_rate[1] < 1


def test_items_without_another_of_their_class_ask_nothing_but_can_be_found_wrongly():
    embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [1.0, 0.1]])
    metrics = retrieval_metrics(embeddings, torch.tensor([0, 0, 1]), torch.arange(3), ks=(1, 2))
    assert metrics.num_queries == 2
    assert metrics.num_without_match == 1
    assert metrics.hit_rate == {1: 0.0, 2: 1.0}  # the single one of class 1 is nearest to both
    assert metrics.as_dict() == {"R@1": 0.0, "R@2": 1.0, "MAP@R": 0.0}


def test_rows_of_any_shape_are_gathered():
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
        ({"embeddings": torch.full((5, 2), torch.nan)}, "NaN or infinite"),
        ({"labels": torch.arange(5)}, "no two share a class"),
        (
            {"gallery": (torch.randn(2, 2), torch.arange(3, 5), torch.arange(8, 10))},
            "none of 5 queries has an item",
        ),
        (
            {"gallery": (torch.randn(0, 2), torch.arange(0), torch.arange(0))},
            "none of 5 queries has an item",
        ),
        (
            {"gallery": (torch.randn(2, 2), torch.arange(2), torch.arange(2))},
            "under another class .* the index 1",
        ),
        (
            {"gallery": (torch.randn(2, 3), torch.arange(2), torch.arange(2))},
            "Embed both with one model",
        ),
    ],
)
def test_bad_input_is_one_clear_error(change, message):
    good = {
        "embeddings": torch.randn(5, 2),
        "labels": torch.tensor([0, 0, 1, 1, 1]),
        "indices": torch.arange(5),
    }
    retrieval_metrics(**good)
    with pytest.raises(ValueError, match=message):
        retrieval_metrics(**{**good, **change})
