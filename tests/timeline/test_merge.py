"""The ranks' files become one: after a run, after a crash, without a shared folder."""

import json

import pytest

from lightning_ring.cli.main import main
from lightning_ring.comm.recording import CollectiveRecord
from lightning_ring.timeline.recorder import BACKWARD, FORWARD, STEPS, Recorder
from lightning_ring.timeline.trace_files import TraceFile, gather_files, merge, read_other
from tests.checks.trace_format import read_trace, slices, tracks
from tests.processes import wait_for
from tests.thread_ranks import run_ranks

ZERO = 1000.0  # seconds of the rank's clock


def about(rank, world_size, run="b", offset=0.0):
    clock = {"offset": offset, "error": 2e-5, "at": ZERO + offset, "shared": rank == 0}
    return {
        "generator": "lightning_ring",
        "run": run,
        "began": f"2025-01-0{1 + ord(run) - ord('a')}",
        "world_size": world_size,
        "rank": {"rank": rank, "host": f"host{rank}", "zero": ZERO + offset, "clock": clock},
    }


def record(name, at, ended, waited):
    times = at, at + 1e-4, waited, max(waited, ended), ended
    return CollectiveRecord(name, "all_reduce", 4000, *times)


def record_rank(path, rank, world_size, *, close=True, **kw):
    """Ten steps of 100 ms, by a clock that is ``offset`` ahead."""
    other = about(rank, world_size, **kw)
    file = TraceFile(path.with_name(f"{path.stem}.rank{rank}.jsonl"), other, max_bytes=1 << 22)
    recorder = Recorder(file, rank, f"rank {rank} (host{rank})", "", other["rank"]["zero"])

    def clock(seconds):
        return other["rank"]["zero"] + seconds

    for step in range(10):
        now = 1 + step / 10
        recorder.begin_step(step, clock(now))
        for name, *times in (
            ("bucket 0 (a)", 0.05, 0.07, 0.06),
            ("bucket 1 (b)", 0.06, 0.09, 0.08),
        ):
            recorder.collective(record(name, *(clock(now + time) for time in times)))
        recorder.slice(STEPS, f"step {step}", clock(now), clock(now + 0.1), {"step": step})
        recorder.slice(FORWARD, "forward", clock(now), clock(now + 0.03), {"step": step})
        recorder.slice(BACKWARD, "backward", clock(now + 0.03), clock(now + 0.09), {"step": step})
    if close:
        recorder.close(other | {"ended": "now"})
    else:
        wait_for(
            lambda: file.path.read_bytes().count(b"\n") > 60
        )  # then it is as if it had been killed


def test_queues_and_waits_are_drawn(tmp_path):
    record_rank(tmp_path / "t.json", 0, 1)
    merged = merge(tmp_path / "t.json")
    assert ([*merged.others], merged.missing, merged.unfinished) == ([0], [], [])
    events = read_trace(tmp_path / "t.json")
    assert len(events) == merged.num_events
    assert tracks(events, 0) == [
        "gradients of bucket 0",
        "waiting for communication",
        "gradients of bucket 1",
        "steps",
        "forward",
        "backward",
    ]
    second = slices(events, "gradients of bucket 1", 0)[3]
    assert (
        second["args"] | {"bytes": 4000, "step": 3, "queued_us": 1e4, "waited_us": 1e4}
        == second["args"]
    )
    assert second["ts"] == pytest.approx(1.36e6)
    assert second["dur"] == pytest.approx(3e4)
    queued = [event for event in events if event["name"] == "queued"]
    assert len(queued) == 10, "behind the bucket before, which took the wire until 10 ms later"
    assert queued[3]["dur"] == pytest.approx(1e4)
    waits = slices(events, "waiting for communication", 0)
    assert [event["name"] for event in waits[:2]] == [
        f"wait for gradients of bucket {number}" for number in (0, 1)
    ]


def test_clocks_that_differ_have_one_zero(tmp_path):
    path = tmp_path / "t.json"
    for rank, offset in enumerate([0.0, 5.0, -7.0]):
        record_rank(path, rank, 3, offset=offset)
    merge(path)
    events = read_trace(path)
    for rank in (1, 2):
        begins = [[step["ts"] for step in slices(events, "steps", one)] for one in (rank, 0)]
        assert begins[0] == pytest.approx(begins[1], abs=5), "microseconds"


def test_after_a_crash_what_is_there_is_merged_and_what_is_missing_is_named(tmp_path, capfd):
    path = tmp_path / "t.json"
    record_rank(path, 0, 4)
    record_rank(path, 1, 4, close=False)
    record_rank(path, 3, 4, run="a")  # of a run before
    (tmp_path / "t.rank2.jsonl").write_text("{")
    (tmp_path / "other.json").write_text("{}")
    assert main(["timeline", str(tmp_path)]) == 1
    out, err = capfd.readouterr()
    assert "2 of 4 rank(s)" in out
    assert "not closed by rank(s) 1" in err
    assert "missing: rank(s) 2, 3. Copy t.rank2.jsonl" in err
    assert "left out: t.rank3.jsonl: of an earlier run" in err
    assert "left out: t.rank2.jsonl: " in err
    events = read_trace(path)
    assert len(slices(events, "steps", 1)) == 10
    assert json.loads(path.read_bytes())["otherData"]["missing_ranks"] == [2, 3]


def test_the_command_writes_where_it_is_told_and_draws(tmp_path, capfd):
    for rank in range(2):
        record_rank(tmp_path / "t.json", rank, 2)
    merged, picture = tmp_path / "out.json", tmp_path / "out.png"
    words = f"timeline {tmp_path}/t.json -o {merged} --plot {picture} --steps 2-3"
    arguments = words.split()
    assert main(arguments) == 0
    assert len(slices(read_trace(merged), "waiting for communication", 1)) == 20
    assert not (tmp_path / "t.json").exists()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*arguments[:-1], "80"]) == 2
    assert "--steps 80-80: the trace holds none of these steps" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}"], "holds no timeline: there is no file such as trace.rank0.jsonl"),
        (["{tmp}/gone.json"], "there is no gone.rank0.jsonl or the like"),
        (["{tmp}", "--plot", "picture.bmp"], "must end in .png, .svg or .pdf"),
    ],
)
def test_bad_input_of_the_command(tmp_path, capfd, arguments, message):
    assert main(["timeline", *(argument.format(tmp=tmp_path) for argument in arguments)]) == 2
    assert message in capfd.readouterr().err


def test_without_a_shared_folder_files_travel_to_rank_0(tmp_path):
    """Rank 2's file was not written; rank 0 has a stale one of rank 1."""
    folders = [tmp_path / f"host{rank}" for rank in range(3)]
    for folder in folders:
        folder.mkdir()
    for rank in range(2):
        record_rank(folders[rank] / "t.json", rank, 3)
    record_rank(folders[0] / "t.json", 1, 3, run="a")
    results = run_ranks(
        3, lambda comm: gather_files(folders[comm.rank] / "t.json", "b", comm, comm.rank)
    )
    assert results[0] == results[1] == results[2]
    assert len(results[0]) == 1
    assert "rank 2: " in results[0][0]
    assert "No such file" in results[0][0]
    assert read_other(folders[0] / "t.rank1.jsonl")["run"] == "b"
    merged = merge(folders[0] / "t.json")
    assert ([*merged.others], merged.missing) == ([0, 1], [2])
