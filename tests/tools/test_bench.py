"""`lightning-ring bench`: what it refuses, what it measures, and that it notices wrong sums."""

import json
import re
import sys

import pytest
import torch

from lightning_ring.cli import bench
from lightning_ring.comm.communicator import shard
from lightning_ring.errors import CollectiveError, ConfigurationError
from lightning_ring.tools.bench import BACKENDS, COLLECTIVES, COPY, session
from lightning_ring.tools.bench.measure import Timing, measure
from tests import forked
from tests.processes import clean_env, mpirun_command, run
from tests.thread_ranks import run_ranks

CPU = torch.device("cpu")
COMMAND = [sys.executable, "-m", "lightning_ring.cli.main", "bench"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    kept = clean_env()
    for name in set(bench.os.environ) - set(kept):
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1024", 1024), ("25M", 25 << 20), ("25MiB", 25 << 20), ("25MB", 25_000_000), ("1.5k", 1536)],
)
def test_sizes(text, size):
    assert bench.parse_size(text) == size


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--sizes big", "'big' is not a size"),
        ("--sizes 4K,,", "'' is not a size"),
        ("--sizes 3", "Write 4 bytes or more"),
        ("--seconds nan", "--seconds"),
        ("--compare mpi --backends gloo", "--compare mpi"),
        ("--json /nowhere/at/all.json", "--json /nowhere/at/all.json: cannot be written"),
        ("-n 1", "1 rank(s) exchange nothing"),
        ("-n 3 -H localhost:2", "more ranks than the 2 slots"),
        ("-H localhost:x", "-H"),
    ],
)
def test_bad_input_is_said_before_anything_starts(options, said):
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        bench.main(options.split())


@pytest.mark.parametrize(
    ("options", "size", "said"),
    [
        ("-n 4", "2", "-n 4, but Open MPI started 2 ranks"),
        ("-H localhost:2", "2", "Leave them out here"),
        ("", "1", "exchange nothing"),
    ],
)
def test_what_contradicts_the_launcher_is_refused(options, size, said, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", size)
    with pytest.raises(ConfigurationError, match=said):
        bench.main(options.split())


class Broken:
    """A communicator of which one rank's result of one collective is off by one in one element."""

    def __init__(self, comm, collective):
        self._comm = comm
        self._broken = f"{collective}_"

    def __getattr__(self, name):
        method = getattr(self._comm, name)
        return self._wrong(method) if name == self._broken else method

    def _wrong(self, method):
        def run(flat):
            work = method(flat)
            work.wait()
            if self._comm.rank == 1:
                shard(flat, self._comm.world_size, self._comm.shard_index)[-1] += 1
            return work

        return run


def measured(comm, contender, collective, sizes):
    return list(measure({"this": contender}, comm, CPU, collective, sizes, seconds=1e-3))


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_right_results_pass_and_a_wrong_element_does_not(world_size, collective):
    sizes = [4, 1000, 300_000]  # from one element a rank to more than one period of the numbers
    for found in run_ranks(world_size, lambda comm: measured(comm, comm, collective, sizes)):
        for size, row in zip(sizes, found, strict=True):
            assert [timing.backend for timing in row] == [COPY, "this"]
            for timing in row:
                assert 0 < timing.least <= timing.median <= timing.p95
                assert timing.num_calls >= 5
                assert abs(timing.num_bytes - size) < 4 * world_size
    wrong = rf"this: {collective} .* left 1 of \d+ elements wrong on rank"
    with pytest.raises(CollectiveError, match=wrong):
        run_ranks(
            world_size, lambda comm: measured(comm, Broken(comm, collective), collective, [1000])
        )


def test_bandwidths_are_those_of_nccl_tests():
    for collective, bus in (("all_reduce", 1.5), ("reduce_scatter", 0.75), ("all_gather", 0.75)):
        timing = Timing(collective, "mpi", 10**9, median=1.0, least=0.5, p95=2.0, num_calls=5)
        assert timing.algorithm_bandwidth == 1e9
        assert timing.bus_bandwidth(4) == bus * 1e9
    assert Timing("all_reduce", COPY, 10**9, 1.0, 1.0, 1.0, 5).bus_bandwidth(4) == 1e9


@pytest.mark.parametrize(("last", "warned"), [(1.6e-3, False), (0.2e-3, True)])
def test_a_line_that_is_far_from_the_times_is_said(last, warned):
    times = {2**14: 0.1e-3, 2**16: 0.4e-3, 2**17: 0.8e-3, 2**18: last}
    timings = [
        Timing("all_reduce", "mpi", size, seconds, seconds, seconds, 5)
        for size, seconds in times.items()
    ]
    models = session.fitted_models(timings, 2)
    assert (models[0]["residual"] > 0.5) == warned
    assert ("warning: residuals above 50%" in "".join(session.model_lines(models))) == warned


def test_ratios_are_the_peers_median_over_each_median():
    timings = [
        Timing("all_reduce", name, 1024, s, s, s, 5)
        for name, s in ((COPY, 1.0), ("a", 2.0), ("b", 8.0))
    ]
    lines = list(session.timing_lines(timings, world_size=2, peer="b"))
    assert [line.split()[2] for line in lines] == ["a", "b"]
    assert [float(line.split()[-1]) for line in lines] == [4.0, 1.0]


@pytest.mark.ranks
def test_it_starts_ranks_measures_every_backend_and_writes_what_it_found(tmp_path):
    files = ["--json", str(tmp_path / "out.json")]
    options = "-n 2 --device cpu --sizes 1K,10001,300K --seconds 0.01 --compare torch-gloo"
    result = run([*COMMAND, *options.split(), *files], **forked.ranks())
    assert result.returncode == 0, result.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["world"] == {"world_size": 2, "num_nodes": 1, "device": "cpu"}
    backends = set(BACKENDS) - set(found["missing"])
    assert {"mpi", "gloo", "torch-gloo"} <= backends
    rows = found["timings"]
    assert {(r["collective"], r["backend"], r["num_bytes"]) for r in rows} == {
        (collective, backend, size)
        for collective in COLLECTIVES
        for backend in {*backends, COPY}
        for size in (1024, 10000, 307200)
    }
    for row in rows:
        assert row["algorithm_bandwidth"] == pytest.approx(row["num_bytes"] / row["median"])
    assert len(found["models"]) == len(COLLECTIVES) * len(backends)
    for size in (1, 300):
        assert re.search(rf" {size} KiB  torch-gloo .* 1\.00\n", result.stdout)


@pytest.mark.ranks
def test_a_backend_that_the_launcher_rules_out_is_an_error_that_says_so():
    torchrun = "-m torch.distributed.run --nproc-per-node=2 -m lightning_ring.cli.main"
    words = f"{torchrun} bench --backends mpi --sizes 1K".split()
    result = run([*forked.python(), *words], **forked.ranks())
    assert result.returncode != 0
    assert (
        "mpi cannot be measured here: torchrun started the ranks, not MPI. There are: auto, gloo"
        in result.stdout
    )


@pytest.mark.ranks
def test_under_mpirun_it_uses_those_ranks():
    options = "--backends mpi --collectives all_gather --sizes 4K --seconds 0.01"
    result = run(mpirun_command(3, *forked.python(), *COMMAND[1:], *options.split()))
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("3 ranks on 1 node(s), cpu") == 1
    assert result.stdout.count(" KiB  mpi") == 1
