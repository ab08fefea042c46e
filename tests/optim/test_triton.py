"""The Triton kernels: under Triton's interpreter everywhere, and on a GPU where there is one."""

import copy
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import pytest
import torch

from lightning_ring.optim.engine.parameter_list import TensorKind
from lightning_ring.optim.engine.triton_kernel import BLOCK, CHUNK, compile_module
from tests.optim.ways import (
    INTERPRETED,
    every_optimizer,
    random_params,
    relative_difference,
    set_random_grads,
)
from tests.processes import ROOT, run

pytest.importorskip("triton", reason="Triton is not installed")

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no NVIDIA GPU on this machine"
)


@pytest.mark.ranks
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreted run")
@pytest.mark.timeout(600)
def test_under_the_interpreter():
    # converges is 150 steps, the oracles 50: hours for an interpreter; the battery compares with
    # the plain way.
    which = "fused and (test_battery and not converges)"
    files = [str(ROOT / "tests" / "optim" / "test_battery.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files, "-k"]

    def run_part(part):
        words = [*command, f"{which} and {part}"]
        return run(words, timeout=280, TRITON_INTERPRET="1")

    with ThreadPoolExecutor() as pool:  # the interpreter keeps one core busy
        results = list(pool.map(run_part, ["LARS", "not LARS"]))
    for done in results:
        assert done.returncode == 0, done.stdout[-6000:]
        assert " passed" in done.stdout


ARGUMENTS = {
    "measure": ({"chunks": "*i64", "pointers": "*i64", "scalars": "*fp64", "sums": "*fp64"}, 8),
    "add_up": ({"first_chunk": "*i64", "sums": "*fp64", "by_row": "*fp64", "num_rows": "i32"}, 4),
    "move": ({"chunks": "*i64", "pointers": "*i64", "scalars": "*fp64"}, 8),
}


@pytest.mark.ranks
@pytest.mark.skipif(INTERPRETED, reason="what is interpreted is not compiled")
@pytest.mark.parametrize(
    ("weight", "mirror"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16)],
    ids=str,
)
@every_optimizer
def test_it_compiles_for_real_gpus(optimizer_class, weight, mirror, tmp_path, monkeypatch):
    """To machine code, which needs no GPU: the interpreter takes what the compiler refuses."""
    compiler = pytest.importorskip("triton.compiler")
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    if tuple(map(int, version("triton").split(".")[:2])) < (3, 3):
        pytest.skip("this Triton takes other arguments")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    grad = torch.bfloat16 if mirror else weight
    kind = TensorKind(torch.device("cuda"), torch.float32, weight, grad, mirror, flat=True)
    module = compile_module(optimizer_class, kind)
    constants = {
        "measure": {"CHUNK": CHUNK, "BLOCK": BLOCK},
        "add_up": {"BLOCK": 128},
        "move": {"CHUNK": CHUNK, "BLOCK": BLOCK},
    }
    for name, (types, num_warps) in ARGUMENTS.items():
        signature = types | dict.fromkeys(constants[name], "constexpr")
        source = compiler.ASTSource(module[name], signature, constants[name])
        compiled = compiler.compile(source, target=target, options={"num_warps": num_warps}).asm
        assert compiled["cubin"]
        if name != "add_up":  # 16 bytes at a time, for chunks that are whole and aligned
            assert re.search(r"ld\.global\S*\.v4\.b32", compiled["ptx"])


@pytest.mark.gpu
@needs_gpu
@every_optimizer
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize(
    "way", [{}, {"fused": True}, {"foreach": True}, {"foreach": False}], ids=str
)
def test_on_cuda(optimizer_class, way, dtype):
    shapes = [(), (0,), (7,), (300, 70), (64, 3, 7, 7), (100_003,)]
    params = [p.detach().cuda().requires_grad_() for p in random_params(dtype=dtype, shapes=shapes)]
    copies = [p.detach().double().cpu().requires_grad_() for p in params]
    optimizer = optimizer_class(params, lr=0.1, weight_decay=0.01, **way)
    oracle = optimizer_class(copies, lr=0.1, weight_decay=0.01, foreach=False)
    for step in range(5):
        set_random_grads(params, step)
        for param, copied in zip(params, copies, strict=True):
            copied.grad = param.grad.double().cpu()
        optimizer.step()
        oracle.step()
    tolerance = {
        torch.float64: 1e-12,
        torch.float32: 2e-6,
        torch.bfloat16: 2e-2,
        torch.float16: 2e-3,
    }[dtype]
    for param, copied in zip(params, copies, strict=True):
        assert relative_difference(param.cpu(), copied) < tolerance


@pytest.mark.gpu
@needs_gpu
@every_optimizer
@pytest.mark.parametrize("way", [{}, {"foreach": True}], ids=str)
def test_the_step_waits_for_nothing(optimizer_class, way):
    params = [p.detach().cuda().requires_grad_() for p in random_params(dtype=torch.float32)]
    optimizer = optimizer_class(params, lr=0.1, **way)
    set_random_grads(params, 0)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
        ratios = optimizer.trust_ratios
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(ratios).all()


@pytest.mark.gpu
@needs_gpu
@every_optimizer
def test_in_a_cuda_graph(optimizer_class):
    params = [
        p.detach().cuda().requires_grad_()
        for p in random_params(dtype=torch.float32, shapes=[(300, 70), (50,)])
    ]
    others = [p.detach().clone().requires_grad_() for p in params]
    lr = torch.tensor(0.1, device="cuda")
    optimizer = optimizer_class(params, lr=lr, capturable=True)
    eager = optimizer_class(others, lr=0.1)
    set_random_grads(params, 0)
    for other, param in zip(others, params, strict=True):
        other.grad = param.grad.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    eager.step()
    for step in range(1, 4):
        rate = 0.1 / (1 + step)
        lr.fill_(rate)
        eager.param_groups[0]["lr"] = rate
        replacements = copy.deepcopy(others)
        set_random_grads(replacements, step)
        for param, other, new in zip(params, others, replacements, strict=True):
            param.grad.copy_(new.grad)
            other.grad.copy_(new.grad)
        graph.replay()
        eager.step()
    for a, b in zip(params, others, strict=True):
        assert relative_difference(a, b) < 1e-6


@pytest.mark.gpu
@needs_gpu
@every_optimizer
def test_state_goes_between_devices(optimizer_class):
    params = random_params(dtype=torch.float32)
    moved = [p.detach().cuda().requires_grad_() for p in params]
    optimizer, other = optimizer_class(params, lr=0.1), optimizer_class(moved, lr=0.1)
    set_random_grads(params, 0)
    optimizer.step()
    other.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        for a, b in zip(moved, params, strict=True):
            a.copy_(b)
    for p, o in ((params, optimizer), (moved, other)):
        set_random_grads(p, 1)
        o.step()
    for a, b in zip(params, moved, strict=True):
        assert relative_difference(b.cpu(), a) < 1e-6
