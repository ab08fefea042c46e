"""The orthonormal columns of PowerSGD's factors: Gram-Schmidt against a QR decomposition."""

from types import SimpleNamespace

import pytest
import torch

from lightning_ring.gradients.compression.powersgd import LowRank, orthonormal
from tests.gpu import on_gpu
from tests.operations import Operations
from tests.thread_ranks import run_ranks


def some_factors(rank, rows=100, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(3, rows, rank, generator=generator, dtype=dtype)


def noise_for(factors):
    generator = torch.Generator().manual_seed(99)
    return 2 * torch.rand(factors[0].numel() + 5, generator=generator, dtype=factors.dtype) - 1


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("scale", [1e-33, 1.0, 1e30])
@pytest.mark.parametrize("rows", [6, 4608])
def test_columns_span_the_space_of_qr(rank, scale, rows):
    factors = some_factors(rank, rows) * torch.logspace(0, -3, rank)
    found = orthonormal(factors * scale, noise_for(factors)).double()
    wanted = torch.linalg.qr(factors.double()).Q
    assert_orthonormal(found)
    cosines = torch.linalg.svdvals(found.mT @ wanted)
    torch.testing.assert_close(cosines, torch.ones_like(cosines), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [7, 5000])
@pytest.mark.parametrize(
    "kind", ["zeros", "one zero", "equal", "opposite", "dependent", "one spike"]
)
def test_columns_without_a_direction_get_one(rank, dtype, rows, kind):
    """QR gives them some, too: a factor of zeros would stay zero for ever."""
    factors = some_factors(rank, rows, dtype)
    if kind == "zeros":
        factors.zero_()
    elif kind == "one zero":
        factors[:, :, rank - 2] = 0
    elif kind in ("equal", "opposite"):
        factors[:, :, 1] = factors[:, :, 0] * (1 if kind == "equal" else -3)
    elif kind == "dependent":
        factors[:, :, -1] = factors[:, :, :-1].sum(2)
    else:
        factors.zero_()[:, 3] = 1
    assert_orthonormal(orthonormal(factors, noise_for(factors)).double())


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_is_seen_in_the_average(bad):
    factors = some_factors(2)
    factors[1, 5, 0] = bad
    found = orthonormal(factors, noise_for(factors))
    assert not found[1].isfinite().all()
    assert found[0].isfinite().all()


def test_products_are_not_rounded_to_tensorfloat_32():
    """As float32 ones are under `torch.set_float32_matmul_precision`."""
    factors = some_factors(4)
    with Operations(arguments=True) as operations:
        orthonormal(factors, noise_for(factors))
    called = zip(operations.names, operations.calls, strict=True)
    products = [args[0] for name, (_, args) in called if name in ("bmm", "mm", "baddbmm")]
    assert {product.dtype for product in products} == {torch.float64}


@on_gpu
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_the_host_does_not_wait_for_a_gpu(precision):
    factors = some_factors(4, 4608)
    factors[:, :, 1] = factors[:, :, 0]
    factors[:, :, 3] = factors[:, :, :3].sum(2)
    noise, factors = noise_for(factors).cuda(), factors.cuda()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        orthonormal(factors, noise)  # libraries start
        torch.cuda.set_sync_debug_mode("error")
        found = orthonormal(factors, noise)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.set_float32_matmul_precision(before)
    assert_orthonormal(found.double().cpu())


def assert_orthonormal(found):
    products = found.mT @ found
    torch.testing.assert_close(
        products, torch.eye(found.shape[2]).expand_as(products).to(products), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("rank", [1, 2, 4, 5])
def test_matrices_of_one_shape_are_one_batch(rank):
    def count(num_matrices):
        def of_rank(comm):
            compressor = LowRank(rank, start_iter=0)
            flat = torch.randn(num_matrices * 2400)
            views = [
                view.view(*((40, 60) if i % 2 else (60, 40)))
                for i, view in enumerate(flat.split(2400))
            ]
            names = list(map(str, range(num_matrices)))
            compressor.prepare(flat, SimpleNamespace(names=names, views=views))
            compressor.begin_backward()
            with Operations() as operations:
                compressor.all_reduce(flat, comm, name="bucket").wait()
            return operations.names

        names = run_ranks(1, of_rank)[0]
        return names.count("linalg_qr"), names.count("linalg_vector_norm")

    few, many = count(2), count(12)
    assert few == many
    assert (few[0] > 0) == (rank > 4)
    assert (few[1] > 0) == (rank <= 4)
