"""The benchmarks run end to end, and jobs that take turns do not overlap. What they measure is
not asserted.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from benchmarks.elastic.outlive import Outcome, outcome
from benchmarks.elastic.outlive_rank import DEADLY
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import checks, delayed, no_waits, thread_ranks, trainer_ways
from benchmarks.gpu.__main__ import NAMES
from benchmarks.gpu.stages import GPU_TESTS, JPEG_TESTS
from benchmarks.step import __main__ as step
from benchmarks.turns import Conductor
from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.comm.backends import nccl
from lightning_ring.gradients.compression import FP32
from tests.comm.backends import fake_nccl
from tests.processes import ROOT, run

JOB = """
import os, sys, time
from benchmarks.turns import Turns
job = sys.argv[2]
turns = Turns(job)
with open(sys.argv[1], "a", buffering=1) as log:
    while turns.wait():
        log.write(f"{job} {os.getpid()}\\n")
        time.sleep(0.002)
turns.leave({"pid": os.getpid()})
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "job.py").write_text(JOB)
    return [sys.executable, str(tmp_path / "job.py"), str(tmp_path / "log")]


@pytest.mark.ranks
def test_jobs_take_turns_and_only_timed_steps_count(job: list[str], tmp_path: Path) -> None:
    with Conductor(tmp_path) as conductor:
        conductor.open([[*job, "a"], [*job, "b"]], "ab", num_ranks=1)
        times = [conductor.turn(name, 3) for name in "abba"]
        facts = conductor.finish()
    assert [len(turn) for turn in times] == [3, 3, 3, 3]
    assert all(seconds >= 0.002 for turn in times for seconds in turn)
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert [name for name, _ in lines] == ["a"] * 4 + ["b"] * 8 + ["a"] * 4, (
        "3 timed steps a turn, and one before"
    )
    assert {(name, int(pid)) for name, pid in lines} == {
        (name, facts[name][0]["pid"]) for name in "ab"
    }


@pytest.mark.ranks
def test_a_job_that_fails_is_an_error_with_its_output_and_ends_the_others(
    job: list[str], tmp_path: Path
) -> None:
    fails = [sys.executable, "-c", "raise ValueError('no such photo')"]
    said = r"(?s)a job ended with exit code 1:.*no such photo"
    with pytest.raises(SystemExit, match=said), Conductor(tmp_path) as conductor:
        conductor.open([[*job, "a"], fails], "ab", num_ranks=1)
    until = time.monotonic() + 60
    while any(str(tmp_path) in cmdline for cmdline in command_lines()):
        assert time.monotonic() < until, "job a still runs"
        time.sleep(0.05)


@pytest.mark.ranks
def test_a_rank_that_leaves_while_its_launcher_waits_is_an_error_with_its_output(
    job: list[str], tmp_path: Path
) -> None:
    leaves = "Turns('b')._stream.close(); print('no such photo', flush=True); time.sleep(60)"
    waits = [sys.executable, "-c", f"import time; from benchmarks.turns import Turns; {leaves}"]
    said = r"(?s)b: a rank left in mid-turn, or hangs:.*no such photo"
    with Conductor(tmp_path) as conductor:
        conductor.open([[*job, "a"], waits], "ab", num_ranks=1)
        with pytest.raises(SystemExit, match=said):
            conductor.turn("b", 3)


def command_lines() -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(file.read_text())
        except OSError:
            continue  # it ended meanwhile
    return found


@pytest.mark.ranks
def test_ddp_and_the_ring_are_timed_side_by_side(tmp_path: Path) -> None:
    words = [
        "one_node",
        "--model",
        "tiny",
        "--contenders",
        "ddp",
        "ring:bucket_cap_mb=4",
        "ring_sharded",
        "--steps",
        "2",
        "--rounds",
        "2",
    ]
    result = run([sys.executable, "-m", "benchmarks.step", *words, "--json", str(tmp_path / "out")])
    assert result.returncode == 0, result.stdout
    found = json.loads((tmp_path / "out").read_text())
    contenders = ("ddp", "ring:bucket_cap_mb=4", "ring_sharded")
    assert {name: len(times) for name, times in found["seconds"].items()} == dict.fromkeys(
        contenders, 4
    )
    strategies = {
        name: {fact["strategy"] for fact in facts} for name, facts in found["facts"].items()
    }
    assert strategies == {name: {"RingStrategy"} for name in contenders} | {"ddp": {"DDPStrategy"}}
    elements = 3 * 8 * 9 + 8 + 288 * 10 + 10
    sharded = found["facts"].pop("ring_sharded")
    assert all(
        fact["state_bytes"] == 4 * elements for facts in found["facts"].values() for fact in facts
    )
    assert sum(fact["state_bytes"] for fact in sharded) == 4 * elements  # one part a rank
    assert "of the time of ddp" in result.stdout


def test_a_death_is_timed_to_the_next_step_and_lost_steps_are_counted() -> None:
    before = [(step, 80.0 + step) for step in range(1, DEADLY)]
    # another rank ends the victim's last step behind its death
    late = [*before[:-1], (DEADLY - 1, 100.01)]
    goes_on = outcome(100.0, [before, [*late, (DEADLY, 101.5)], [*before, (DEADLY, 101.0)]])
    assert goes_on == Outcome(
        step=1.0, next_step=1.0, new_step=1.0, lost=0, join=pytest.approx(1.49)
    )
    starts_again = [(step, 100.0 + step) for step in range(DEADLY - 2, DEADLY + 2)]
    assert outcome(100.0, [before, late, starts_again]) == Outcome(
        1.0, DEADLY - 2.0, float(DEADLY), lost=2
    )
    goes_back = [*late, (DEADLY - 2, 101.0), (DEADLY - 1, 102.0), (DEADLY, 103.0)]
    assert outcome(100.0, [before, goes_back]) == Outcome(1.0, 1.0, 3.0, lost=2, join=1.0)


@pytest.mark.ranks
def test_a_rank_is_killed_and_the_next_step_is_timed() -> None:
    words = ["--contenders", "ring_elastic:gloo", "--ranks", "2", "--mib", "4", "--jobs", "1"]
    result = run([sys.executable, "-m", "benchmarks.elastic.outlive", *words])
    assert result.returncode == 0, result.stdout
    assert re.search(
        r"\| ring_elastic:gloo \| \d+ ms \| (\d\.\d\d s \(largest \d\.\d\d\) \| ){2}0 \|",
        result.stdout,
    )


@pytest.mark.ranks
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_gpu_benchmark_says_so_in_one_line() -> None:
    result = run([sys.executable, "-m", "benchmarks.gpu"])
    assert result.returncode == 77
    assert result.stdout.splitlines() == [
        "no NVIDIA GPU that torch can use here: nothing was measured"
    ]


@pytest.mark.ranks
def test_the_gpu_benchmark_walks_its_whole_way_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    words = ["--device", "cpu", "--tiny", "--out", str(tmp_path)]
    result = run([sys.executable, "-m", "benchmarks.gpu", *words], timeout=280)
    assert result.returncode == 0, result.stdout
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    ended = {row["stage"]: row["exit"] for row in rows if "exit" in row}
    assert ended == dict.fromkeys(set(NAMES) - {"tests", "counters"}, 0)
    by_stage = {name: [row for row in rows if row["stage"] == name] for name in NAMES}
    checked = {
        name: {row["check"]: row["ok"] for row in by_stage[name] if "check" in row}
        for name in ("ways", "waits", "ranks", "delayed")
    }
    assert {name: len(found) for name, found in checked.items()} == {
        "ways": 34,
        "waits": 29,
        "ranks": 33,
        "delayed": 12,
    }
    assert all(ok for found in checked.values() for ok in found.values())
    assert checked["ways"].keys() > {"ring", "ring, onebit", "ring_sharded, LAMB", "ring_local"}
    assert checked["waits"].keys() > {"ring", "ring_sharded, int8"}
    assert checked["ranks"].keys() > {
        "ring, 4 ranks",
        "sharded, LAMB, 3 ranks",
        "terngrad, 3 ranks",
    }
    assert "delayed sharded, recorded" in checked["delayed"]
    for fact in ("share_of_copy", "host_ms", "code"):
        assert any(fact in row for row in by_stage["bandwidth"]), fact
    assert "of the time of ddp" in (tmp_path / "log.txt").read_text()


@pytest.mark.ranks
def test_a_stage_that_hangs_or_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hangs.py").write_text("import time; print('{}'); time.sleep(600)")
    (tmp_path / "fails.py").write_text("raise ValueError('no such photo')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(
        gpu,
        "STAGES",
        [
            [gpu.Stage("a", 3, "hangs"), gpu.Stage("b", 30, "fails")],
            [gpu.Stage("c", 30, gpu.SHORT, "ceilings"), gpu.Stage("d", 30, "fails")],
        ],
    )
    asked = argparse.Namespace(device="cpu", tiny=True, budget=60.0, stages=list("abc"), lines=3)
    assert not gpu.run(asked, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    ended = {row["stage"]: row["exit"] for row in rows if "exit" in row}
    assert ended == {"a": "ended after its 3 s", "b": 1, "c": 0}
    assert {"stage": "a"} in rows  # what it said before
    assert "no such photo" in capsys.readouterr().out


@pytest.mark.ranks
def test_wrong_sums_among_thread_ranks_are_rows_that_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fake_nccl, "reduced", lambda rows, op: rows[-1].clone())
    assert thread_ranks.main("cpu", tiny=True) == 1
    rows = {row["check"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    wrong = {name for name, row in rows.items() if not row["ok"]}
    # these codes travel by other collectives than sums
    coded = ("int8", "onebit", "topk", "dgc", "terngrad", "powersgd, 1 rank")
    assert all(name.startswith(coded) for name in rows.keys() - wrong)
    assert rows["ring, 2 ranks"]["largest"] > 1e-3
    assert rows["sharded, LAMB, 3 ranks"]["at"].startswith("gradients/delivery.py:")


@pytest.mark.parametrize("algorithm", [Averaging, Sharded])
def test_who_does_not_wait_for_a_delayed_collective_fails_its_check(
    monkeypatch: pytest.MonkeyPatch, algorithm: type[Averaging | Sharded]
) -> None:
    monkeypatch.setattr(nccl, "dist", fake_nccl.FakeDistributed())
    check = partial(delayed.small, "cpu", algorithm)
    assert checks.row("waits", check)["ok"]
    monkeypatch.setattr(delayed.LateWork, "wait", lambda self: True)
    assert not checks.row("does not wait", check)["ok"]


def test_under_a_delayed_collective_reads_are_nan_and_writes_are_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl, "dist", fake_nccl.FakeDistributed())
    comm, flat = delayed.ring_over("cpu"), torch.arange(5.0)
    for start in (comm.all_reduce_, comm.reduce_scatter_, comm.all_gather_, comm.broadcast_):
        work = start(flat)
        assert flat.isnan().all()
        flat.zero_()
        assert not work.done()
        work.wait()
        assert torch.equal(flat, torch.arange(5.0))


def test_a_check_that_fails_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_ways, "train", _train_without_trainer)
    first, second = (
        checks.row(way.name, partial(trainer_ways.compare, way, "cpu", {}))
        for way in (
            trainer_ways.Way("broken", 0.0, {"compression": "no such"}),
            trainer_ways.Way("ring", 0.0),
        )
    )
    assert (first["ok"], second["ok"]) == (False, False)  # the second has not moved
    assert "ConfigurationError" in first["error"]
    assert first["at"].startswith("algorithms/averaging.py:")
    assert second["bits"]


def _train_without_trainer(way: trainer_ways.Way, strategy: Any, device: str) -> torch.Tensor:
    if strategy:
        trainer_ways.forced(**strategy)
    L.seed_everything(3, verbose=False)
    return trainer_ways.flat(trainer_ways.Net())


class Broken(FP32):
    def accepts(self, dtype: torch.dtype) -> bool:
        return True

    def all_reduce(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("called a synchronizing CUDA operation")


@pytest.mark.ranks
def test_a_way_that_waits_is_named_with_its_line() -> None:
    way = no_waits.Way(Averaging, {"compression": Broken()})
    found = checks.row("broken", partial(no_waits.train, way, "cpu"))
    assert found["error"] == "ValueError: called a synchronizing CUDA operation"
    assert found["at"].startswith("gradients/delivery.py:")


def test_turns_are_compared_by_their_means() -> None:
    peer = [1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    middle, low, high = step.ratio_of_turns([1.1, 1.1, 1.0, 3.2, 4.8, 4.8], peer, steps=2)
    assert (middle, low, high) == pytest.approx((1.1, 1.05, 1.2))


# hydra goes once pytest has loaded its plugins, of which it is one
MISSING = """
import sys
sys.modules.update(dict.fromkeys(("pytorch_metric_learning", "simplejpeg")))
import pytest
from benchmarks.gpu.stages import selection
class Missing:
    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self):
        sys.modules["hydra"] = None
sys.exit(pytest.main([*selection(), "--collect-only"], plugins=[Missing()]))
"""


def test_every_gpu_test_is_in_a_file_that_the_gpu_benchmark_names() -> None:
    mark = "pytest.mark." + "gpu"
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*.py")
        if mark in path.read_text()
    }
    assert marked == {*GPU_TESTS, *JPEG_TESTS, "tests/integrations/lightning/test_gpu.py"}


@pytest.mark.ranks
def test_gpu_tests_are_collected_without_packages_that_other_tests_need() -> None:
    result = run([sys.executable, "-c", MISSING], PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.stdout
    assert all(f"{name}::" in result.stdout for name in GPU_TESTS), result.stdout


@pytest.mark.ranks
def test_the_control_plane_is_measured_with_simulated_ranks(tmp_path: Path) -> None:
    words = ["benchmarks.scale", "--ranks", "16", "--processes", "2"]
    result = run([sys.executable, "-m", *words], PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.stdout
    found = {}
    for line in result.stdout.splitlines():
        if match := re.fullmatch(r"(\S.*?) +\S+ s +\S+ bytes, +(\S+) messages a rank", line):
            found.setdefault(match[1], float(match[2]))
    assert found.keys() >= {"start", "a stall report", "a death", "first view", "next view"}
    assert 0 < found["start"] < 40
