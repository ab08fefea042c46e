"""Only tensors that differ are sent; a digest tells any two tensors apart."""

from __future__ import annotations

import pytest
import torch

from lightning_ring.comm.differences import broadcast_differing, digest_of
from lightning_ring.comm.replicate import broadcast_optimizer_state
from tests.thread_ranks import run_ranks


def test_only_what_differs_is_sent() -> None:
    def rank(comm):
        tensors = [torch.full((n,), float(n)) for n in (3, 2000, 5, 0, 1)]
        before = [tensor.data_ptr() for tensor in tensors]
        if comm.rank == 2:
            tensors[1][1999] = -1.0
            tensors[4].zero_()
        sent = broadcast_differing(tensors, comm, compares=comm.rank == 2)
        assert [tensor.data_ptr() for tensor in tensors] == before
        return sent, [tensor.tolist() for tensor in tensors]

    results = run_ranks(3, rank)
    assert {sent for sent, _ in results} == {4 * 2001}
    assert results[0] == results[1] == results[2]


def test_the_state_of_an_optimizer_is_kept_where_it_is_the_same() -> None:
    def rank(comm):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(2))]
        optimizer = torch.optim.Adam(params, lr=0.1 * (comm.rank + 1))
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
        first = optimizer.state[params[0]]["exp_avg"]
        if comm.rank == 1:
            optimizer.state[params[0]]["exp_avg_sq"] += 1
            del optimizer.state[params[1]]
        if comm.rank == 2:  # a rank that compares nothing, with another order of memory
            state = optimizer.state[params[0]]
            state["exp_avg"] = state["exp_avg"].t().contiguous().t()
        sizes = []

        def send(tensors, new):
            sizes.append(broadcast_differing(tensors, comm, compares=comm.rank == 1, new=new))

        broadcast_optimizer_state(optimizer, comm, send=send)
        assert comm.rank == 2 or optimizer.state[params[0]]["exp_avg"] is first
        return (
            sizes,
            [group["lr"] for group in optimizer.param_groups],
            optimizer.state_dict()["state"],
        )

    (sizes, lrs, state), *others = run_ranks(3, rank)
    assert sizes == [4 * (12 + 12 + 2 + 2 + 1)]  # exp_avg, exp_avg_sq, all of the second parameter
    for other_sizes, other_lrs, other in others:
        assert other_sizes == sizes
        assert other_lrs == lrs == [0.1]
        for index, values in state.items():
            for name, value in values.items():
                assert torch.equal(value, other[index][name]), (index, name)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64],
)
@pytest.mark.parametrize("numel", [1, 3, 8, 1021, 8168, 8169, 20000])
def test_a_changed_element_is_found(dtype: torch.dtype, numel: int) -> None:
    tensor = torch.arange(numel).remainder(2).to(dtype)
    same = tensor.clone()
    assert digest_of(tensor) == digest_of(same)
    for index in {0, numel // 2, numel - 1}:
        other = tensor.clone()
        other[index] = 1 - int(other[index].real)
        assert digest_of(other) != digest_of(tensor), index


def test_exchanged_rows_and_signs_of_zero_are_found() -> None:
    rows = torch.randn(64, 1024)
    assert digest_of(rows[torch.randperm(64)]) != digest_of(rows)
    assert digest_of(rows.flip(0)) != digest_of(rows)
    for dtype in (torch.float32, torch.float64):
        zeros, values = torch.zeros(4084, dtype=dtype), torch.randn(4084, dtype=dtype)
        assert digest_of(-zeros) != digest_of(zeros)
        assert digest_of(-values) != digest_of(values)


def test_views_and_other_orders_of_memory_have_digests() -> None:
    base = torch.randn(40, 30)
    assert digest_of(base[3:7]) == digest_of(base[3:7].clone())
    assert digest_of(base[:, 4]) == digest_of(base[:, 4].clone())
    assert digest_of(base.t()) == digest_of(base.t().clone())
    assert digest_of(torch.ones(1).expand(9)) == digest_of(torch.ones(9))
    assert digest_of(torch.tensor(2.0)) != digest_of(torch.tensor(3.0))
    assert digest_of(torch.empty(0, 3)) == digest_of(torch.empty(0, 3))
