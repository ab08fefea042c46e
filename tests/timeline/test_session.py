"""What the argument and the environment may say of a timeline, real fits that record one, and what
stands in its way: one error, the same on every rank.
"""

import os
from pathlib import Path

import pytest

from lightning_ring.errors import ConfigurationError
from lightning_ring.options import RingOptions
from lightning_ring.timeline.recorder import STEPS
from lightning_ring.timeline.session import start_session
from lightning_ring.timeline.settings import timeline_path
from lightning_ring.timeline.trace_files import TraceFile
from tests.battery import check_names
from tests.checks.trace_format import read_trace, slices
from tests.thread_ranks import run_ranks


def refused(path, world_size=2):
    """The error that all ranks raise."""

    def rank(comm):
        with pytest.raises(ConfigurationError) as caught:
            start_session(path, comm, about={})
        return str(caught.value)

    said = run_ranks(world_size, rank)
    assert len(set(said)) == 1
    return said[0]


def test_a_disk_that_rank_0_filled_is_the_error_of_rank_1_on_both(tmp_path, monkeypatch):
    """Rank 0's file is there, and the disk has no room for another."""
    opened, opens = os.open, []

    def no_room(path, *arguments, **keywords):
        if str(path).endswith(".jsonl"):
            opens.append(Path(path).name)
            if opens.count("trace.rank0.jsonl") != 1 or "rank1" in opens[-1]:
                raise OSError(28, "No space left on device")
        return opened(path, *arguments, **keywords)

    monkeypatch.setattr(os, "open", no_room)
    said = refused(tmp_path / "trace.json")
    assert (
        f"cannot be written (rank 1: {tmp_path}/trace.rank1.jsonl: No space left on device)" in said
    )
    assert sorted(opens) == ["trace.rank0.jsonl", "trace.rank1.jsonl"]
    assert not list(tmp_path.iterdir())


def test_a_path_that_another_job_writes_is_refused_on_every_rank(tmp_path, monkeypatch):
    first = start_session(tmp_path / "t.json", None, about={})
    # another process has none
    monkeypatch.setattr("lightning_ring.timeline.session._times_started", {})
    first.recorder.slice(STEPS, "step 0", 0.0, 1.0)
    said = refused(tmp_path / "t.json")
    assert "t.json is in use: t.rank0.jsonl, another job" in said
    first.finish()
    assert [event["name"] for event in slices(read_trace(tmp_path / "t.json"), "steps", 0)] == [
        "step 0"
    ]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["t.json", "t.rank0.jsonl"]

    second = start_session(tmp_path / "t.json", None, about={})
    second.finish()
    assert "step 0" not in (tmp_path / "t.json").read_text(), (
        "the first one has ended, and is replaced"
    )


def test_a_rank_whose_own_file_is_taken_is_named(tmp_path):
    """As where another job's other rank runs on its host."""
    file = TraceFile(tmp_path / "t.rank1.jsonl", {"generator": "another"}, max_bytes=1 << 22)
    before = file.path.read_bytes()
    assert f"(rank 1: {file.path}: another job is writing it now)" in refused(tmp_path / "t.json")
    assert file.path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [file.path.name]
    file.close({"generator": "another"})


def test_a_folder_that_nobody_can_make_names_the_variable():
    said = refused(Path("/proc/nope/trace.json"))
    assert "/proc/nope" in said
    assert "Give timeline= or RING_TIMELINE a path" in said


MODULE = "tests.checks.timeline"


@pytest.mark.parametrize("check", check_names(MODULE))
def test_timeline(battery, check):
    battery(MODULE, 2, check)


def test_the_argument_counts_more_than_the_environment(tmp_path):
    environ = {"RING_TIMELINE": str(tmp_path / "env.json")}
    assert timeline_path(None, {}) is None
    assert timeline_path(None, environ) == tmp_path / "env.json"
    argument = tmp_path / "new" / "folder" / "argument.json"
    assert timeline_path(argument, environ) == argument
    assert not (tmp_path / "new").exists(), "nothing is made before training"


def test_a_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert timeline_path("~/t.json", {}) == tmp_path / "t.json"
    assert timeline_path(None, {"RING_TIMELINE": "~/t.json"}) == tmp_path / "t.json"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "ends in .json"),
        (True, "ends in .json"),
        ("trace", "ends in .json"),
        ("trace.txt", "ends in .json"),
        ("{tmp}/folder.json", "exists and was not written as a timeline"),
        ("{tmp}/mine.json", "exists and was not written as a timeline"),
    ],
)
def test_a_path_that_cannot_work_is_an_error_when_the_strategy_is_built(tmp_path, value, message):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "mine.json").write_text('{"precious": 1}')
    value = value.format(tmp=tmp_path) if isinstance(value, str) else value
    with pytest.raises(ConfigurationError, match=message) as caught:
        RingOptions(timeline=value)
    assert f"timeline={value!r}" in str(caught.value)
    if isinstance(value, str):
        with pytest.raises(ConfigurationError, match=f"RING_TIMELINE is '.*{message}"):
            timeline_path(None, {"RING_TIMELINE": value})
