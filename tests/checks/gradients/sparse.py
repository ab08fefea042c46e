"""Sparse gradients: gathered or dense on the wire, sparse for the optimizer; ranks have other
numbers of entries.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from lightning_ring.gradients.compression import COMPRESSORS
from lightning_ring.gradients.reducer import Reducer
from lightning_ring.gradients.sparse import sparse_weights
from tests.checks.gradients.nets import fresh_gradients
from tests.checks.world import communicator

RANK, SIZE = communicator().rank, communicator().world_size


class _Net(nn.Module):
    """Two embeddings and a layer, float64. A rank whose indices are empty does not use an
    embedding.
    """

    def __init__(self, *, sparse):
        super().__init__()
        self.first = nn.Embedding(40, 3, sparse=sparse)
        self.second = nn.EmbeddingBag(6, 3, sparse=sparse, mode="sum")
        self.layer = nn.Linear(3, 2)
        self.double()

    def forward(self, first, second):
        hidden = (
            self.first(first).square().sum(0) if len(first) else torch.zeros(3, dtype=torch.float64)
        )
        if len(second):
            hidden = hidden + self.second(second.unsqueeze(0)).tanh()[0]
        return self.layer(hidden).sum()


def _indices(rank, step):
    """Other numbers of entries on each rank, doubled ones among them; none at all on rank 1 in
    step 1.
    """
    generator = torch.Generator().manual_seed(17 * step + rank)
    count = 0 if (rank, step) == (1, 1) else 3 + rank
    return torch.randint(0, 40, (count,), generator=generator), torch.randint(
        0, 6, (4 * count,), generator=generator
    )


def _make(**kwargs):
    torch.manual_seed(0)
    net = _Net(sparse=True)
    reference = _Net(sparse=False)
    reference.load_state_dict(net.state_dict())
    reducer = Reducer(
        communicator(),
        net.named_parameters(),
        sparse_weights=partial(sparse_weights, net),
        **kwargs,
    )
    return net, reference, reducer


def _assert_same(net, reference, sparse):
    for (name, param), expected in zip(net.named_parameters(), reference.parameters(), strict=True):
        assert param.grad is not None, name
        assert param.grad.is_sparse == (name in sparse), name
        dense = param.grad.to_dense()
        torch.testing.assert_close(
            dense, expected.grad, rtol=1e-12, atol=1e-14, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert all(torch.equal(other, dense) for other in communicator().all_gather(dense)), (
            f"{name}: other bits"
        )


def check_sparse_gradients_stay_sparse_and_equal_the_dense_average():
    net, reference, reducer = _make()
    for step in range(3):
        with fresh_gradients(net, reference), reducer.backward():
            net(*_indices(RANK, step)).backward()
        (sum(reference(*_indices(rank, step)) for rank in range(SIZE)) / SIZE).backward()
        # `second` has more entries on all ranks together than rows: its values travel dense
        _assert_same(net, reference, ("first.weight", "second.weight"))
        assert net.first.weight.grad.is_coalesced()
        touched = set(torch.cat([_indices(rank, step)[0] for rank in range(SIZE)]).tolist())
        assert set(net.first.weight.grad.indices()[0].tolist()) == touched
    assert not any(name.endswith("d.weight") for bucket in reducer.buckets for name in bucket.names)


def check_sparse_gradient_that_no_rank_has_stays_as_it_is():
    net, _, reducer = _make()
    none = torch.zeros(0, dtype=torch.int64)
    with reducer.backward():
        net(none, none).backward()
    assert net.first.weight.grad is None
    assert net.second.weight.grad is None
    embedding = nn.Embedding(9, 2, sparse=True)  # alone: no bucket carries the request to stop
    alone = Reducer(
        communicator(),
        embedding.named_parameters(),
        sparse_weights=partial(sparse_weights, embedding),
    )
    for step in range(7):
        alone.stop_requested = (RANK, step) == (0, 6)
        with alone.backward():
            embedding(torch.tensor([RANK])).sum().backward()
        assert alone.agreed_to_stop() == (step == 6)


def check_sparse_gradient_that_no_module_declares_travels_dense_with_one_warning():
    weight = nn.Parameter(torch.zeros(6, 2))
    warned = []
    reducer = Reducer(communicator(), [("weight", weight)], warn=warned.append)
    for _ in range(2):
        weight.grad = None
        with reducer.backward():
            F.embedding(torch.tensor([RANK]), weight, sparse=True).sum().backward()
    expected = torch.zeros(6, 2)
    expected[:SIZE] = 1 / SIZE
    torch.testing.assert_close(weight.grad, expected)
    assert len(warned) == 1
    assert "weight is sparse" in warned[0]


def check_sharded_and_compressed_say_what_becomes_of_sparse_gradients():
    warned = []
    _make(compressor=COMPRESSORS["bf16"].build(), warn=warned.append)
    assert sum("does not take sparse gradients" in message for message in warned) == 1
    warned.clear()
    net = _Net(sparse=True)
    reducer = Reducer(
        communicator(),
        net.named_parameters(),
        shards=True,
        warn=warned.append,
        sparse_weights=partial(sparse_weights, net),
    )
    for step in (0, 2):
        with fresh_gradients(net), reducer.backward():
            net(*_indices(RANK, step)).backward()
        assert not net.first.weight.grad.is_sparse
    assert len(warned) == 2  # one for each weight
    assert all("`ring_sharded`" in message for message in warned)
