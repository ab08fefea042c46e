"""The Triton kernels: under Triton's interpreter everywhere, and on a GPU where there is one."""

import copy
import re
import sys

import pytest
import torch

from lightning_ring.optim.engine import fused
from lightning_ring.optim.engine.fused import NUM_WARPS, constants_of, kernels
from lightning_ring.optim.engine.parameter_list import TensorKind
from tests.gpu import on_gpu
from tests.machine_code import compiled, resources
from tests.optim.test_battery import reference
from tests.optim.ways import (
    INTERPRETED,
    assert_near,
    every_optimizer,
    random_params,
    set_random_grads,
    take_steps,
)
from tests.processes import ROOT, run

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.ranks
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreted run")
@pytest.mark.timeout(600)
def test_under_the_interpreter():
    # converges is 150 steps, the oracles 50: hours for an interpreter; the battery compares with
    # the plain way.
    which = "fused and test_battery and not converges or interpreted_kernels"
    folder = ROOT / "tests" / "optim"
    files = [str(folder / f"test_{name}.py") for name in ("battery", "triton", "numbers")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    done = run([*command, "-k", which], timeout=580, TRITON_INTERPRET="1")
    if "only 0-dimensional arrays can be converted" in done.stdout:
        pytest.skip("the interpreter of this Triton (3.6) needs numpy < 2.5")
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout


interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="test_under_the_interpreter runs this with TRITON_INTERPRET=1"
)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
every_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def kind_of(weight, grad, mirror=None):
    compute = torch.float64 if weight == torch.float64 else torch.float32
    return TensorKind(torch.device("cuda"), compute, weight, grad, mirror, way="fused")


def steps_as_in_float64(optimizer_class, params, num_steps=2, **way):
    """Steps of ``params``, against the plain way in float64."""
    settings = {"lr": 0.1, "weight_decay": 0.01}
    expected = reference(optimizer_class, params, num_steps, **settings)
    take_steps(optimizer_class(params, **settings, **way), params, 0, num_steps)
    assert_near(params, expected, TOLERANCE[params[0].dtype])


@interpreted
@every_optimizer
@every_dtype
def test_interpreted_kernels_at_every_edge(optimizer_class, dtype):
    block = constants_of(optimizer_class, kind_of(dtype, dtype), move=False)["BLOCK"]
    edges = [0, 1, 31, 32, 33, block - 1, block, block + 1, fused.CHUNK, fused.CHUNK + 1]
    for sizes in (edges, [1]):  # Triton makes a constant of a number of parameters that is 1
        params = random_params(dtype=dtype, shapes=[(size,) for size in sizes])
        steps_as_in_float64(optimizer_class, params, fused=True)


@interpreted
@every_optimizer
@every_dtype
def test_interpreted_kernels_far_into_a_tensor(optimizer_class, dtype, monkeypatch):
    """Chunks that begin 2**33 elements after an address that is as much too low: offsets in 32 bits
    would miss the memory.
    """
    start = 1 << 33
    chunks_of, pointers_of = fused.chunks_of, fused.pointers_of

    def far_chunks(*arguments):
        chunks, first = chunks_of(*arguments)
        return chunks + torch.tensor([0, start, 0]), first

    def low_pointers(part, tables):
        itemsizes = [column[0].element_size() for column in part.columns()]
        return pointers_of(part, tables) - start * torch.tensor([*itemsizes, 0])

    monkeypatch.setattr(fused, "chunks_of", far_chunks)
    monkeypatch.setattr(fused, "pointers_of", low_pointers)
    params = random_params(dtype=dtype, shapes=[(33,), (fused.CHUNK,)])
    steps_as_in_float64(optimizer_class, params, fused=True)


ARGUMENTS = {
    "scalars": {
        "groups": "*i64",
        "hyper": "*fp64",
        "steps": "*fp32",
        "count": "fp32",
        "clips": "*fp64",
        "numbers": "*fp64",
    },
    "sweep": {"chunks": "*i64", "pointers": "*i64", "numbers": "*fp64", "sums": "*fp64"},
    "add_up": {"first_chunk": "*i64", "sums": "*fp64", "by_row": "*fp64", "num_rows": "i32"},
    "rates": {"sums": "*fp64", "numbers": "*fp64", "ratios": "*fp64", "num_rows": "i32"},
}


def compiled_kernel(name, constants, num_warps, arch, divisible):
    """With the arguments specialized as Triton does for addresses that are multiples of 16."""
    arguments = ARGUMENTS[name.removeprefix("lamb_").removeprefix("lars_")]
    signature = arguments | dict.fromkeys(constants, "constexpr")
    pointers = [i for i, kind in enumerate(signature.values()) if kind.startswith("*")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in pointers} if divisible else {}
    source = getattr(kernels(), name), signature, constants, attributes
    return compiled(*source, arch, num_warps=num_warps)


def compiles(test):
    not_interpreted = pytest.mark.skipif(INTERPRETED, reason="interpreted is not compiled")
    return pytest.mark.ranks(not_interpreted(test))


@compiles
@pytest.mark.parametrize(
    ("weight", "grad", "mirror", "arch"),
    [
        (torch.float32, torch.float32, None, 80),
        (torch.bfloat16, torch.bfloat16, None, 90),
        (torch.float32, torch.bfloat16, torch.bfloat16, 90),
    ],
    ids=str,
)
@every_optimizer
def test_four_programs_fit_a_multiprocessor(
    optimizer_class, weight, grad, mirror, arch, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kind = kind_of(weight, grad, mirror)
    for name, move in {"measure": False, "move": True}.items():
        constants = constants_of(optimizer_class, kind, move) | ({"sums": None} if move else {})
        for divisible in (False, True):
            code = compiled_kernel("sweep", constants, NUM_WARPS, arch, divisible)
            registers, spilled = resources(code["cubin"], tmp_path)
            # A multiprocessor has 65,536 registers and gives a thread a multiple of 8 of them.
            programs = 65536 // (-(-registers // 8) * 8 * 32 * NUM_WARPS)
            assert programs >= 4, f"{name} takes {registers} registers"
            assert spilled == 0, f"{name} spills"
            # 16 bytes at a time of the widest tensors, for chunks that are whole and aligned.
            assert re.search(r"ld\.global\S*\.v4\.b32", code["ptx"]), name
            # A chunk's start goes into addresses in 64 bits.
            assert re.search(r"tt\.addptr .*!tt\.ptr<(f32|bf16)>, i64", code["ttir"]), name
            assert not re.search(r"tt\.addptr .*!tt\.ptr<(f32|bf16)>, i32", code["ttir"]), name


@compiles
@pytest.mark.parametrize("num_rows", [1, 2])
@every_optimizer
def test_sums_and_rates_compile_for_one_parameter_too(
    optimizer_class, num_rows, tmp_path, monkeypatch
):
    """Triton makes a constant of an argument that is 1."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"num_rows": 1} if num_rows == 1 else {}
    assert compiled_kernel("add_up", constants | {"BLOCK": 128}, 4, 90, True)["cubin"]
    assert compiled_kernel(f"{optimizer_class.kernels}_rates", constants, 1, 90, True)["cubin"]


@compiles
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("same_step", [False, True])
@every_optimizer
def test_scalars_compile(optimizer_class, same_step, clipped, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    absent = {"steps": None} if same_step else {"count": None}
    if not clipped:
        absent["clips"] = None
    if not optimizer_class.counts_steps:
        absent |= {"steps": None, "count": None}
    assert compiled_kernel(f"{optimizer_class.kernels}_scalars", absent, 1, 90, True)["cubin"]


def copied(params):
    return [p.detach().cuda().clone().requires_grad_() for p in params]


@on_gpu
@every_optimizer
@every_dtype
@pytest.mark.parametrize(
    "way", [{}, {"fused": True}, {"foreach": True}, {"foreach": False}], ids=str
)
def test_on_cuda(optimizer_class, way, dtype):
    shapes = [(), (0,), (7,), (300, 70), (64, 3, 7, 7), (100_003,)]
    params = copied(random_params(dtype=dtype, shapes=shapes))
    steps_as_in_float64(optimizer_class, params, num_steps=5, **way)


@on_gpu
@every_optimizer
@pytest.mark.parametrize("way", [{}, {"foreach": True}], ids=str)
def test_the_step_waits_for_nothing(optimizer_class, way):
    params = copied(random_params(dtype=torch.float32))
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


def captured(optimizer):
    """A graph of its second step, and of no other work."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph


@on_gpu
@every_optimizer
def test_in_a_cuda_graph(optimizer_class):
    params = copied(random_params(dtype=torch.float32, shapes=[(300, 70), (50,)]))
    others = copied(params)
    lr = torch.tensor(0.1, device="cuda")
    optimizer = optimizer_class(params, lr=lr, capturable=True)
    eager = optimizer_class(others, lr=0.1)
    set_random_grads(params, 0)
    set_random_grads(others, 0)
    graph = captured(optimizer)
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
    assert_near(params, others, 1e-6)


@on_gpu
@every_optimizer
def test_a_graph_survives_eager_steps_with_other_gradients(optimizer_class):
    """The eager step makes a table of other addresses; the graph still reads the one it saw."""
    params = copied(random_params(dtype=torch.float32, shapes=[(300, 70), (50,)]))
    others = copied(params)
    optimizer = optimizer_class(params, lr=0.1, capturable=True)
    eager = optimizer_class(others, lr=0.1)
    grads = {}
    for which in ("captured", "later"):
        set_random_grads(params, len(grads))
        grads[which] = [param.grad for param in params]

    def use(which):
        for param, other, grad in zip(params, others, grads[which], strict=True):
            param.grad, other.grad = grad, grad.clone()

    use("captured")
    graph = captured(optimizer)
    eager.step()
    for which in ("later", "captured", "later"):
        use(which)
        optimizer.step()
        eager.step()
        # Memory that was given back would be taken by one of these.
        taken = [torch.zeros(size, dtype=torch.int64, device="cuda") for size in (8, 10, 64) * 20]
        use("captured")
        graph.replay()
        eager.step()
        del taken
    assert_near(params, others, 1e-6)


@on_gpu
@every_optimizer
def test_state_goes_between_devices(optimizer_class):
    params = random_params(dtype=torch.float32)
    moved = copied(params)
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
    assert_near(moved, params, 1e-6)
