"""The benchmarks run end to end, and jobs that take turns do not overlap. What they measure is
not asserted.
"""

import argparse
import json
import re
import sys

import pytest
import torch

from benchmarks import gpu
from benchmarks.elastic.outlive import Outcome, outcome
from benchmarks.elastic.outlive_rank import DEADLY
from benchmarks.gpu import GPU_TESTS, JPEG_TESTS
from benchmarks.step import __main__ as step
from benchmarks.turns import Conductor
from tests import forked
from tests.processes import ROOT, run, wait_for

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
def job(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "job.py").write_text(JOB)
    return [sys.executable, str(tmp_path / "job.py"), str(tmp_path / "log")]


@pytest.mark.ranks
def test_jobs_take_turns_and_only_timed_steps_count(job, tmp_path):
    with Conductor(tmp_path) as conductor:
        conductor.open([[*job, "a"], [*job, "b"]], "ab", num_ranks=1)
        times = [conductor.turn(name, 3) for name in "abba"]
        facts = conductor.finish()
    assert [len(turn) for turn in times] == [3, 3, 3, 3]
    assert all(seconds >= 0.002 for turn in times for seconds in turn)
    # 3 timed steps a turn, and one before
    turns = [f"{name} {facts[name][0]['pid']}" for name in "abba" for _ in range(4)]
    assert (tmp_path / "log").read_text().splitlines() == turns


@pytest.mark.ranks
def test_a_job_that_fails_is_an_error_with_its_output_and_ends_the_others(job, tmp_path):
    fails = [sys.executable, "-c", "raise ValueError('no such photo')"]
    said = r"(?s)a job ended with exit code 1:.*no such photo"
    with pytest.raises(SystemExit, match=said), Conductor(tmp_path) as conductor:
        conductor.open([[*job, "a"], fails], "ab", num_ranks=1)
    wait_for(lambda: run(["pgrep", "-f", str(tmp_path)]).stdout == "")  # job a has ended


def said_by(*words):
    """What ``python -m WORDS`` prints."""
    result = run([*forked.python(), "-m", *words], timeout=280, **forked.every())
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.mark.ranks
def test_ddp_and_the_ring_are_timed_side_by_side(tmp_path):
    contenders = ("ddp", "ring:bucket_cap_mb=4", "ring_sharded")
    words = ["one_node", "--model", "tiny", "--steps", "2", "--rounds", "2", "--contenders"]
    said = said_by("benchmarks.step", *words, *contenders, "--json", str(tmp_path / "out"))
    found = json.loads((tmp_path / "out").read_text())
    seconds, facts = found["seconds"], found["facts"]
    assert {name: len(times) for name, times in seconds.items()} == dict.fromkeys(contenders, 4)
    whole = 4 * (192 * 10 + 10)
    for name in contenders:
        strategy = "DDPStrategy" if name == "ddp" else "RingStrategy"
        assert {fact["strategy"] for fact in facts[name]} == {strategy}
        state = [fact["state_bytes"] for fact in facts[name]]
        assert sum(state) == whole if name == "ring_sharded" else state == [whole, whole]
    assert "of the time of ddp" in said


def test_a_death_is_timed_to_the_next_step_and_lost_steps_are_counted():
    before = [(step, 80.0 + step) for step in range(1, DEADLY)]
    # another rank ends the victim's last step behind its death
    late = [*before[:-1], (DEADLY - 1, 100.01)]
    goes_on = outcome(100.0, [before, [*late, (DEADLY, 101.5)], [*before, (DEADLY, 101.0)]])
    assert goes_on == Outcome(1.0, 1.0, 1.0, lost=0, join=pytest.approx(1.49))
    again = outcome(
        100.0, [before, late, [(step, 100.0 + step) for step in range(DEADLY - 2, DEADLY + 2)]]
    )
    assert again == Outcome(1.0, DEADLY - 2.0, float(DEADLY), lost=2)
    goes_back = [*late, (DEADLY - 2, 101.0), (DEADLY - 1, 102.0), (DEADLY, 103.0)]
    assert outcome(100.0, [before, goes_back]) == Outcome(1.0, 1.0, 3.0, lost=2, join=1.0)


@pytest.mark.ranks
def test_a_rank_is_killed_and_the_next_step_is_timed():
    words = ["--contenders", "ring_elastic:gloo", "--ranks", "2", "--mib", "4", "--jobs", "1"]
    row = r"\| ring_elastic:gloo \| \d+ ms \| (\d\.\d\d s \(largest \d\.\d\d\) \| ){2}0 \|"
    assert re.search(row, said_by("benchmarks.elastic.outlive", *words))


@pytest.mark.ranks
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_gpu_benchmark_says_so_in_one_line():
    result = run([*forked.python(), "-m", "benchmarks.gpu"])
    assert result.returncode == 77
    assert result.stdout == "no NVIDIA GPU that torch can use here: nothing was measured\n"


@pytest.mark.ranks
def test_the_gpu_benchmark_walks_its_way_on_the_cpu(tmp_path):
    pytest.importorskip("timm")
    words = ["--device", "cpu", "--tiny", "--stages", "ceilings", "steps", "bandwidth"]
    said_by("benchmarks.gpu", *words, "--out", str(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    ended = {row["stage"]: row["exit"] for row in rows if "exit" in row}
    assert ended == dict.fromkeys(("ceilings", "steps", "bandwidth"), 0)
    for fact in ("torch", "of_ddp", "share_of_copy", "encode_of_copy"):
        assert any(fact in row for row in rows), fact
    assert "of the time of ddp" in (tmp_path / "log.txt").read_text()


@pytest.mark.ranks
def test_a_stage_ends_at_its_limit_with_what_it_said():
    asked = argparse.Namespace(device="cpu", tiny=True)
    code, text = gpu.run("steps", 0.5, asked)
    assert (code, text) == ("ended after its 0 s", "")


def test_turns_are_compared_by_their_means():
    peer = [1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    middle, low, high = step.ratio_of_turns([1.1, 1.1, 1.0, 3.2, 4.8, 4.8], peer, steps=2)
    assert (middle, low, high) == pytest.approx((1.1, 1.05, 1.2))


# hydra goes once pytest has loaded its plugins, of which it is one
MISSING = """
import sys
sys.modules.update(dict.fromkeys(("pytorch_metric_learning", "simplejpeg")))
import pytest
from benchmarks.gpu import selection
class Missing:
    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self):
        sys.modules["hydra"] = None
sys.exit(pytest.main([*selection(), "--collect-only"], plugins=[Missing()]))
"""


def test_every_gpu_test_is_in_a_file_that_the_gpu_benchmark_names():
    mark = re.compile(r"^@on_" r"gpu$|^\s*@?pytest\.mark\." r"gpu\b", re.MULTILINE)
    files = [path for path in (ROOT / "tests").rglob("*.py") if mark.search(path.read_text())]
    marked = {str(path.relative_to(ROOT)) for path in files}
    assert marked - {"tests/gpu/__init__.py"} == {*GPU_TESTS, *JPEG_TESTS} - {"tests/gpu"}


@pytest.mark.ranks
def test_gpu_tests_are_collected_without_packages_that_other_tests_need():
    result = run([*forked.python(), "-c", MISSING])
    assert result.returncode == 0, result.stdout
    assert all(name in result.stdout for name in GPU_TESTS), result.stdout


@pytest.mark.ranks
def test_the_control_plane_is_measured_with_simulated_ranks(tmp_path):
    words = ["benchmarks.scale", "--ranks", "16", "--processes", "2"]
    result = run([sys.executable, "-m", *words], PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.stdout
    found = {}
    for line in result.stdout.splitlines():
        if match := re.fullmatch(r"(\S.*?) +\S+ s +\S+ bytes, +(\S+) messages a rank", line):
            found.setdefault(match[1], float(match[2]))
    assert found.keys() >= {"start", "a stall report", "a death", "first view", "next view"}
    assert 0 < found["start"] < 40
