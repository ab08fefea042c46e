"""The Triton kernels of 8-bit blocks: under Triton's interpreter, compiled, and on a GPU where there is one."""

import re
import sys
from importlib.metadata import version

import pytest
import torch

from tests.processes import run

pytest.importorskip("triton", reason="Triton is not installed")

COMPARE = """
import sys, torch
from lightning_ring.gradients.compression import blocks, blocks_triton

device = sys.argv[1]
for numel in (0, 1, 255, 256, 5003, 40_000):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 1e-3
    values[300:520] = 0
    count = -(-numel // blocks.BLOCK)
    found = []
    for way, place in ((blocks, "cpu"), (blocks_triton, device)):
        x = values.to(place)
        numbers = torch.zeros(count * blocks.BLOCK, dtype=torch.int8, device=place)
        scales = torch.zeros(count, device=place)
        way.encode(x, numbers, scales)
        out = torch.full_like(x, torch.nan)
        way.decode(numbers, scales, out)
        found.append([each.cpu() for each in (numbers, scales, out)])
    (numbers, scales, out), (others, other_scales, other_out) = found
    assert (numbers.int() - others.int()).abs().max() <= 1 if numel else True  # a tie, behind a reciprocal
    assert (numbers == others).float().mean() > 0.999 if numel else True
    torch.testing.assert_close(scales, other_scales, rtol=1e-6, atol=0)
    torch.testing.assert_close(out, other_out, rtol=1e-5, atol=float(scales.max()) if numel else 0)
for bad in (torch.inf, -torch.inf, torch.nan):
    x = torch.ones(1000, device=device)
    x[300] = bad
    numbers = torch.zeros(1024, dtype=torch.int8, device=device)
    scales = torch.zeros(4, device=device)
    blocks_triton.encode(x, numbers, scales)
    blocks_triton.decode(numbers, scales, x)
    assert not x[256:512].isfinite().any() and x[:256].isfinite().all() and x[512:].isfinite().all()
print("equal")
"""


@pytest.mark.ranks
def test_interpreted_kernels_equal_those_of_the_cpu():
    done = run([sys.executable, "-c", COMPARE, "cpu"], TRITON_INTERPRET="1")
    assert done.stdout.strip().endswith("equal"), done.stdout[-3000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU on this machine")
def test_kernels_on_a_gpu_equal_those_of_the_cpu():
    done = run([sys.executable, "-c", COMPARE, "cuda"])
    assert done.stdout.strip().endswith("equal"), done.stdout[-3000:]


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["encode_kernel", "decode_kernel"])
def test_they_compile_for_real_gpus(name, tmp_path, monkeypatch):
    """To machine code, which needs no GPU: the interpreter takes what the compiler refuses."""
    compiler = pytest.importorskip("triton.compiler")
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    if tuple(map(int, version("triton").split(".")[:2])) < (3, 3):
        pytest.skip("this Triton takes other arguments")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from lightning_ring.gradients.compression import blocks_triton

    constants = {"BLOCK": blocks_triton.BLOCK, "ROWS": blocks_triton.ROWS}
    types = {"values": "*fp32", "numbers": "*i8", "scales": "*fp32", "numel": "i64"}
    signature = {
        "encode_kernel": types | {"tiny": "fp32", "step": "fp32"},
        "decode_kernel": types,
    }[name] | dict.fromkeys(constants, "constexpr")
    kernel = getattr(blocks_triton, name)
    source = compiler.ASTSource(kernel, {key: signature[key] for key in kernel.arg_names}, constants)
    compiled = compiler.compile(source, target=target, options={"num_warps": 4}).asm
    assert compiled["cubin"]
    assert re.search(r"(ld|st)\.global", compiled["ptx"])
