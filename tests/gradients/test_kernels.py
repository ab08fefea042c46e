"""The Triton kernels of 8-bit blocks and of signs: interpreted, compiled, and on a GPU where
there is one.
"""

import importlib
import re
import sys
from importlib.metadata import version

import pytest
import torch

from tests.processes import run

pytest.importorskip("triton", reason="Triton is not installed")

COMPARE_BLOCKS = """
import sys, torch
from lightning_ring.gradients.compression import blocks, int8, kernels

device = sys.argv[1]
for numel in (0, 1, 255, 256, 5003, 40_000):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 1e-3
    values[300:520] = 0
    count = -(-numel // blocks.BLOCK)
    found = []
    for way, place in ((int8, "cpu"), (kernels, device)):
        x = values.to(place)
        numbers = torch.zeros(count * blocks.BLOCK, dtype=torch.int8, device=place)
        scales = torch.zeros(count, device=place)
        way.encode_int8(x, numbers, scales)
        out = torch.full_like(x, torch.nan)
        way.decode_int8(numbers, scales, out)
        found.append([each.cpu() for each in (numbers, scales, out)])
    (numbers, scales, out), (others, other_scales, other_out) = found
    # a tie, behind a reciprocal
    assert (numbers.int() - others.int()).abs().max() <= 1 if numel else True
    assert (numbers == others).float().mean() > 0.999 if numel else True
    torch.testing.assert_close(scales, other_scales, rtol=1e-6, atol=0)
    torch.testing.assert_close(out, other_out, rtol=1e-5, atol=float(scales.max()) if numel else 0)
for bad in (torch.inf, -torch.inf, torch.nan):
    x = torch.ones(1000, device=device)
    x[300] = bad
    numbers = torch.zeros(1024, dtype=torch.int8, device=device)
    scales = torch.zeros(4, device=device)
    kernels.encode_int8(x, numbers, scales)
    kernels.decode_int8(numbers, scales, x)
    assert not x[256:512].isfinite().any() and x[:256].isfinite().all() and x[512:].isfinite().all()
print("equal")
"""


COMPARE_SIGNS = """
import sys, torch
from lightning_ring.gradients.compression import blocks, kernels, one_bit

device = sys.argv[1]
for numel in (0, 1, 255, 256, 5003, 40_000):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 1e-3
    values[300:520] = 0
    values[600:900] = torch.nan
    values[1030:1031] = -torch.inf
    count = -(-numel // blocks.BLOCK)
    found = []
    for way, place in ((one_bit, "cpu"), (kernels, device)):
        x = values.to(place)
        bits = torch.zeros(count * blocks.BLOCK // 8, dtype=torch.int8, device=place)
        scales = torch.zeros(count, device=place)
        way.encode_signs(x, bits, scales)
        out = torch.full_like(x, torch.nan)
        way.decode_signs(bits, scales, out)
        found.append([each.cpu() for each in (bits, scales, out)])
    (bits, *others), (found_bits, *found_others) = found
    assert torch.equal(bits, found_bits)
    for one, other in zip(others, found_others):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0, equal_nan=True)
print("equal")
"""
every_code = pytest.mark.parametrize(
    "compare", [COMPARE_BLOCKS, COMPARE_SIGNS], ids=["int8", "signs"]
)


@pytest.mark.ranks
@every_code
def test_interpreted_kernels_equal_those_of_the_cpu(compare):
    done = run([sys.executable, "-c", compare, "cpu"], TRITON_INTERPRET="1")
    assert done.stdout.strip().endswith("equal"), done.stdout[-3000:]


@pytest.mark.ranks
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU on this machine")
@every_code
def test_kernels_on_a_gpu_equal_those_of_the_cpu(compare):
    done = run([sys.executable, "-c", compare, "cuda"])
    assert done.stdout.strip().endswith("equal"), done.stdout[-3000:]


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["encode", "decode"])
@pytest.mark.parametrize("what", ["int8", "signs"])
def test_they_compile_for_real_gpus(what, way, tmp_path, monkeypatch):
    """To machine code, which needs no GPU: the interpreter takes what the compiler refuses."""
    compiler = pytest.importorskip("triton.compiler")
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    if tuple(map(int, version("triton").split(".")[:2])) < (3, 3):
        pytest.skip("this Triton takes other arguments")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = importlib.import_module("lightning_ring.gradients.compression.kernels")
    constants = {"BLOCK": kernels.BLOCK, "ROWS": kernels.ROWS}
    types = {"values": "*fp32", "numbers": "*i8", "bits": "*i8", "scales": "*fp32", "numel": "i64"}
    signature = types | {"tiny": "fp32", "step": "fp32"} | dict.fromkeys(constants, "constexpr")
    kernel = getattr(kernels, f"{way}_{what}_kernel")
    source = compiler.ASTSource(
        kernel, {key: signature[key] for key in kernel.arg_names}, constants
    )
    compiled = compiler.compile(source, target=target, options={"num_warps": 4}).asm
    assert compiled["cubin"]
    assert re.search(r"(ld|st)\.global", compiled["ptx"])
