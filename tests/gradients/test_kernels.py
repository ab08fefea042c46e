"""The Triton kernels of 8-bit blocks and of signs: interpreted, compiled, and on a GPU where
there is one.
"""

import importlib.util
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from lightning_ring.gradients.compression import Int8, OneBit, blocks
from lightning_ring.gradients.compression.between_nodes import messages
from lightning_ring.gradients.compression.int8 import INT8
from lightning_ring.gradients.compression.one_bit import SIGNS
from tests.checks.compression.formulas import OneTensor
from tests.gpu import on_gpu
from tests.machine_code import compiled, resources
from tests.processes import run
from tests.thread_ranks import run_ranks

CODES = {"int8": INT8, "signs": SIGNS}
KERNELS = [f"{way} {code}" for code in CODES for way in ("encode", "decode")]
every_code = pytest.mark.parametrize("code", list(CODES))
with_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@with_triton
@pytest.mark.ranks
def test_interpreted_kernels_equal_float64():
    done = run([sys.executable, "-m", "tests.gradients.kernel_checks"], TRITON_INTERPRET="1")
    assert done.stdout.strip().endswith("equal"), done.stdout[-3000:]


@on_gpu
@with_triton
@every_code
def test_kernels_on_a_gpu_equal_float64(code):
    checks = importlib.import_module("tests.gradients.kernel_checks")
    checks.check(code, "cuda")


@on_gpu
@with_triton
@every_code
def test_codes_take_the_kernels_on_a_gpu(code):
    """Three ranks' shards of a bucket of any length, there and back."""
    values = torch.randn(100_003, generator=torch.Generator().manual_seed(0))
    found = []
    assert blocks.triton_kernels(values.cuda()) is not None
    for place in (values.cuda(), values):
        length = blocks.shard_length(values.numel(), 3)
        sent = messages(3, CODES[code].num_bytes(length), place)
        CODES[code].encode(place, sent)
        out = torch.empty_like(place)
        CODES[code].decode(sent, out)
        own = place.new_empty(length)
        CODES[code].average(sent[:2], own)
        found.append((out.cpu(), own.cpu()))
    for one, other in zip(*found, strict=True):
        far = (one - other).abs() > 1e-5
        assert far.float().mean() < 1e-3


@on_gpu
@with_triton
@every_code
def test_values_beyond_two_to_the_31_on_a_gpu(code):
    numel = 2**31 + 3 * blocks.BLOCK + 5
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("less than 16 GiB of GPU memory are free")
    values = torch.ones(numel, device="cuda")
    values[-blocks.BLOCK :] = -2.0
    sent = messages(1, CODES[code].num_bytes(numel), values)
    CODES[code].encode(values, sent)
    values.zero_()
    CODES[code].decode(sent, values)
    assert values[: 2**20].allclose(values.new_ones(()))
    assert values[2**31 - 2**20 : -2 * blocks.BLOCK].allclose(values.new_ones(()))
    assert values[-5:].allclose(values.new_full((), -2.0))
    del values, sent
    torch.cuda.empty_cache()  # for the tests beside this one


@pytest.mark.parametrize("make", [Int8, OneBit], ids=["int8", "onebit"])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
@pytest.mark.parametrize("numel", [1, 255, 5003, 20_000])
def test_rows_and_shards_begin_at_multiples_of_128_bytes(make, world_size, numel):
    def rank(comm):
        starts = []
        to_all, gather = comm.all_to_all, comm.all_gather_

        def noted(inputs, outputs, *, name=""):
            starts.extend(row.storage_offset() for row in (*inputs, *outputs))
            return to_all(inputs, outputs, name=name)

        def noted_too(flat, *, name=""):
            starts.append(flat.nbytes // comm.world_size)
            return gather(flat, name=name)

        comm.all_to_all, comm.all_gather_ = noted, noted_too
        average(make(min_numel=0), comm, numel)
        return starts

    for starts in run_ranks(world_size, rank):
        one_leg = world_size == 2 and make is Int8
        assert len(starts) == (1 if one_leg else 2 * world_size + 1)
        assert not any(start % 128 for start in starts)
    flat = torch.empty(numel)
    shards = [blocks.aligned_shard(flat, world_size, index) for index in range(world_size)]
    assert torch.cat(shards).numel() == numel
    assert not any(own.storage_offset() * 4 % 128 for own in shards if own.numel())


def average(compressor, comm, numel):
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank))
    compressor.prepare(flat, OneTensor(flat, (numel,)))
    compressor.all_reduce(flat, comm, name="bucket").wait()


@pytest.mark.parametrize("make", [Int8, OneBit], ids=["int8", "onebit"])
def test_more_ranks_take_no_more_launches(make, monkeypatch):
    def count(world_size):
        calls = []
        counted = SimpleNamespace(
            encode=lambda *given: calls.append(given), decode=lambda *given: calls.append(given)
        )
        monkeypatch.setattr(blocks, "triton_kernels", lambda values: counted)
        run_ranks(world_size, lambda comm: average(make(min_numel=0), comm, 5003))
        return len(calls) // world_size

    assert count(3) == count(5) == (4 if make is Int8 else 6)


class Launch:
    """A kernel's arguments, noted in place of a launch."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def note(*arguments, **constants):
            self.given = dict(zip(self.kernel.arg_names, arguments, strict=False)) | constants

        return note

    def compiled(self, capability, **others):
        """For a GPU, as Triton specializes these arguments: by alignment and width.

        ``others`` take the place of arguments.
        """
        signature, constants, attributes = {}, {}, {}
        for param in self.kernel.params:
            value = (self.given | others)[param.name]
            if param.is_constexpr:
                signature[param.name], constants[param.name] = "constexpr", value
                continue
            signature[param.name] = type_of(value)
            place = value.data_ptr() if isinstance(value, torch.Tensor) else value
            if not param.do_not_specialize and place % 16 == 0:
                attributes[(param.num,)] = [["tt.divisibility", 16]]
        return compiled(self.kernel, signature, constants, attributes, capability)


def type_of(value):
    if isinstance(value, torch.Tensor):
        return {torch.float32: "*fp32", torch.int8: "*i8"}[value.dtype]
    return "i32" if value < 2**31 else "i64"


@pytest.fixture
def launches(monkeypatch, tmp_path):
    """What an average of a bucket of 20,003 gradients over three ranks launches, by kernel
    and code.
    """
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = importlib.import_module("lightning_ring.gradients.compression.kernels")
    jitted = {way: getattr(kernels, f"{way}_kernel") for way in ("encode", "decode")}
    noted = {}
    monkeypatch.setattr(blocks, "triton_kernels", lambda values: kernels)
    values = torch.randn(20_003)
    for name, code in CODES.items():
        for way, kernel in jitted.items():
            noted[f"{way} {name}"] = Launch(kernel)
            monkeypatch.setattr(kernels, f"{way}_kernel", noted[f"{way} {name}"])
        sent = messages(3, code.num_bytes(blocks.shard_length(20_003, 3)), values)
        code.encode(values, sent)
        code.decode(sent, values)
    return noted


@pytest.mark.ranks
@pytest.mark.parametrize(("kernel", "capability"), zip(KERNELS, (80, 90, 90, 80), strict=True))
def test_compiled_kernels_move_16_bytes_and_fill_the_gpu(launches, kernel, capability, tmp_path):
    launch = launches[kernel]
    several = {"NUM_MESSAGES": 3} if kernel.startswith("decode") else {}
    for others in ({}, several):
        asm = launch.compiled(capability, **others)
        way = "ld" if kernel.startswith("encode") else "st"
        assert re.search(rf"{way}\.global\S*\.v4\.(b|f)32", asm["ptx"]), "values"
        if "int8" in kernel:
            way = "st" if kernel.startswith("encode") else "ld"
            assert re.search(rf"{way}\.global\S*\.v4\.b32", asm["ptx"]), "numbers"
        assert not re.search(r"(ld|st)\.global\S*\.b8", asm["ptx"])
        registers, stack = resources(asm["cubin"], tmp_path)
        assert registers * 128 * 4 <= 65536, "fewer than 4 CTAs an SM"
        assert stack == 0, "registers spill"


@pytest.mark.ranks
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_count_values_in_64_bits(launches, kernel):
    """And one value is compiled as many are."""
    launch = launches[kernel]
    assert [each.name for each in launch.kernel.params if each.do_not_specialize] == ["numel"]
    for numel in (1, 20_003, 2**31 + 5):
        ttir = launch.compiled(90, numel=numel)["ttir"]
        places = re.findall(r"tt\.addptr .*?, tensor<([^>]*)>\s", ttir)
        assert places
        assert all(place.endswith("xi64") for place in places), places


@pytest.mark.ranks
@pytest.mark.parametrize("kernel", KERNELS)
def test_values_at_any_multiple_of_4_bytes_compile(launches, kernel):
    """A node's part of a bucket begins anywhere."""
    ptx = launches[kernel].compiled(90, values=torch.empty(9)[1:])["ptx"]
    assert not re.search(r"ld\.global\S*\.v4\.f32", ptx)
