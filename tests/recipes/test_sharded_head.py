"""The class-sharded head on 2, 3 and 4 ranks against one process, and against
pytorch-metric-learning.
"""

from functools import partial

import pytest
import torch
from pytorch_metric_learning.losses import ArcFaceLoss, CosFaceLoss
from torch.testing import assert_close

from lightning_ring.optim import LARS
from recipes.recognition.sharded_head import ShardedHead
from tests.refusals import refused
from tests.thread_ranks import run_ranks

# a number of classes that no number of ranks divides; images of all ranks
CLASSES, SIZE, EACH = 11, 6, 12
MARGINS = {"none": 0.0, "cosface": 0.35, "arcface": 28.6}


def head(**options):
    return ShardedHead(
        **{"num_classes": CLASSES, "embedding_size": SIZE, "scale": 16.0, "seed": 3} | options
    )


def joined(comm=None, **options):
    """In float64: Adam makes a step of any gradient, also of one that is rounding alone."""
    model = head(**options)
    model.join(comm)
    return model.double()


def images(step=0):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(EACH, SIZE, generator=generator).double(), torch.randint(
        CLASSES, (EACH,), generator=generator
    )


def trained(model, comm, steps=3, first=0):
    """What a rank learns: losses, and the gradients of its own embeddings, averaged as the
    strategy does.
    """
    if model.optimizer is None:
        model.set_optimizer(partial(torch.optim.Adam, lr=0.1))
    seen = []
    rank, size = (comm.rank, comm.world_size) if comm is not None else (0, 1)
    for step in range(first, first + steps):
        embeddings, labels = (column.chunk(size)[rank] for column in images(step))
        embeddings = embeddings.clone().requires_grad_()
        loss = model(embeddings, labels)
        loss.backward()
        seen += [loss.detach(), embeddings.grad / size]
        model.step(lr=0.1)
    return seen


@pytest.mark.parametrize("margin", list(MARGINS))
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_learn_what_one_process_learns(num_ranks, margin):
    alone = joined(None, margin=margin, size=MARGINS[margin])
    expected = trained(alone, None)

    def one(comm):
        model = joined(comm, margin=margin, size=MARGINS[margin])
        seen = trained(model, comm)
        assert len(model.weight) < CLASSES
        # ranks may have different numbers
        mine = images(9)[0][comm.rank :: num_ranks][: 4 - comm.rank]
        return seen, model.state(), model.predict(mine)

    results = run_ranks(num_ranks, one)
    for step in range(3):
        for rank, (seen, _, _) in enumerate(results):
            assert_close(seen[2 * step], expected[2 * step])
            assert_close(seen[2 * step + 1], expected[2 * step + 1].chunk(num_ranks)[rank])
    assert [state for _, state, _ in results[1:]] == [{}] * (num_ranks - 1)
    whole = alone.state()
    assert_close(results[0][1], whole)
    assert (whole["weight"] - joined().weight).norm() > 0.1  # there was something to learn
    for rank, (_, _, predicted) in enumerate(results):
        assert torch.equal(predicted, alone.predict(images(9)[0][rank::num_ranks][: 4 - rank]))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_checkpoint_goes_on_on_any_number_of_ranks(num_ranks):
    alone = joined(None)
    expected = trained(alone, None, steps=4)[4:]

    def begin(comm):
        model = joined(comm)
        trained(model, comm, steps=2)
        return model.state()

    checkpoint = run_ranks(2, begin)[0]

    def go_on(comm):
        model = joined(comm)
        model.load(checkpoint)
        return trained(model, comm, steps=2, first=2)

    found = run_ranks(num_ranks, go_on) if num_ranks > 1 else [go_on(None)]
    for rank, seen in enumerate(found):
        for mine, whole in zip(seen, expected, strict=True):
            assert_close(mine, whole.chunk(num_ranks)[rank] if whole.ndim else whole)


@pytest.mark.parametrize(
    ("margin", "reference"), [("arcface", ArcFaceLoss), ("cosface", CosFaceLoss)]
)
def test_losses_are_those_of_pytorch_metric_learning(margin, reference):
    size = MARGINS[margin]
    model, library = (
        joined(margin=margin, size=size),
        reference(CLASSES, SIZE, margin=size, scale=16.0),
    )
    library.W.data = model.weight.detach().T.clone()
    embeddings, labels = images()
    embeddings[0] = -model.weight.detach()[labels[0]]  # an angle of 180 degrees
    assert_close(model(embeddings, labels), library(embeddings, labels))


def test_a_sample_of_the_classes_always_holds_those_of_the_batch():
    torch.manual_seed(0)
    model = head(num_classes=100, sample_rate=0.2)
    model.join(None)
    embeddings, labels = torch.randn(30, SIZE), torch.randint(90, (30,))
    weight, columns, mine = model._classes(labels)
    assert len(weight) == len(labels.unique())  # more than 20
    assert torch.equal(weight[columns], model.weight[labels[mine]])
    weight, columns, _ = model._classes(labels[:3])
    assert len(weight) == 20
    assert torch.equal(weight[columns], model.weight[labels[:3]])
    model(embeddings, labels).backward()
    untouched = (model.weight.grad == 0).all(1)
    assert untouched.sum() == 100 - len(labels.unique())
    assert not untouched[labels].any()
    model.eval()
    assert len(model._classes(labels)[0]) == 100


def test_what_would_go_wrong_is_refused():
    model = head()
    model.join(None)
    with refused(r"labels of a batch are from 0 to 11, but the head has 11 classes"):
        model(torch.randn(2, SIZE), torch.tensor([0, 11]))
    with refused("LARS scales steps by the norm of a whole tensor"):
        model.set_optimizer(partial(LARS, lr=0.1))
    with refused(r"has \(5, 6\) classes and numbers a class"):
        model.load({"weight": torch.zeros(5, SIZE), "optimizer": {}})
    with refused("expected none, cosface or arcface"):
        head(margin="sphere")
