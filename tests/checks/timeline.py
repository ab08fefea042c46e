"""Checks of the timeline in real fits on real ranks."""

import json
import os
from contextlib import contextmanager
from functools import partial
from unittest import mock

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ring import RingStrategy
from lightning_ring.errors import ConfigurationError
from lightning_ring.monitor import StepTimer
from lightning_ring.timeline import session
from lightning_ring.timeline.trace_files import TraceFile, read_other
from tests.checks.models import (
    RANK,
    SIZE,
    WORLD,
    Classifier,
    assert_all_ranks_equal,
    fit,
    loader,
    parameters,
)
from tests.checks.trace_format import read_trace, slices, tracks
from tests.checks.world import raised_by_all, said
from tests.refusals import refused
from tests.strategies import ring


def train(strategy, *, batches=6, module=None, **arguments):
    module = module or Classifier()
    fit(
        strategy,
        module,
        loader(batches * 4 * SIZE),
        arguments.pop("val", None),
        **({"max_epochs": 1} | arguments),
    )
    WORLD.Barrier()
    return module


@contextmanager
def environment(**variables):
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def steps_of(events, rank, track="steps"):
    return [event["args"]["step"] for event in slices(events, track, rank)]


def assert_within_steps(events, track, rank):
    """Each slice lies in the step that its ``args`` name, or (new parameters) reaches into the
    next one, give or take a millisecond.
    """
    steps = {s["args"]["step"]: s for s in slices(events, "steps", rank)}
    for event in slices(events, track, rank):
        first = steps[event["args"]["step"]]
        last = steps.get(event["args"]["step"] + 1, first)
        assert first["ts"] - 1e3 <= event["ts"], (track, event)
        assert event["ts"] + event["dur"] <= last["ts"] + last["dur"] + 1e3, (track, event)


def check_every_phase_and_bucket_of_every_step(tmp_path):
    path = tmp_path / "deep" / "trace.json"
    results = []
    for timeline in (None, path):
        L.seed_everything(3, verbose=False)
        module = train(
            RingStrategy(timeline=timeline, bucket_cap_mb=0.0005, force_communication=True)
        )
        results.append(parameters(module))
    assert (results[0] == results[1]).all()
    assert_all_ranks_equal(results[1])
    events = read_trace(path)
    for rank in range(SIZE):
        assert steps_of(events, rank) == list(range(6))
        for track in ("data wait", "forward", "backward", "optimizer step"):
            assert len(slices(events, track, rank)) >= 6, track
            assert_within_steps(events, track, rank)
        buckets = [track for track in tracks(events, rank) if track.startswith("gradients")]
        assert buckets == [f"gradients of bucket {number}" for number in range(len(buckets))]
        assert len(buckets) > 1
        sent = 0
        for track in buckets:
            carried = slices(events, track, rank)
            assert steps_of(events, rank, track) == list(range(6))
            assert {event["name"] for event in carried} == {"all-reduce"}
            assert all(
                event["args"]["waited_us"] >= 0 <= event["args"]["queued_us"] for event in carried
            )
            assert_within_steps(events, track, rank)
            sent += carried[-1]["args"]["bytes"]
        assert sent >= sum(param.nbytes for param in module.parameters())
        waits = [event["name"] for event in slices(events, "waiting for communication", rank)]
        assert [waits.count(f"wait for {track}") for track in buckets] == [6] * len(buckets)
        assert waits.count("wait for reduce") >= 6, "self.log(sync_dist=True)"
    # on one clock: nobody's all-reduce is over before all have called it
    for track in buckets if SIZE > 1 else ():
        for mine in zip(*(slices(events, track, rank) for rank in range(SIZE)), strict=True):
            assert max(event["ts"] for event in mine) <= min(
                event["ts"] + event["dur"] for event in mine
            )
    about = json.loads(path.read_bytes())["otherData"]
    assert about["missing_ranks"] == about["unfinished_ranks"] == []
    assert all(
        rank["clock"]["offset"] == rank["clock"]["error"] == 0 for rank in about["ranks"].values()
    ), "one host"


def check_sharded_steps_have_both_halves(tmp_path):
    path = tmp_path / "trace.json"
    train(ring(True, timeline=path, bucket_cap_mb=0.0005, force_communication=True))
    events = read_trace(path)
    for rank in range(SIZE):
        halves = slices(events, "gradients of bucket 1", rank)
        assert [event["name"] for event in halves] == ["reduce-scatter"] * 6
        gathered = slices(events, "parameters of bucket 1", rank)
        assert [event["name"] for event in gathered] == ["all-gather"] * 6
        # the step that sent them
        assert steps_of(events, rank, "parameters of bucket 1") == list(range(6))
        optimizer = {
            event["args"]["step"]: event for event in slices(events, "optimizer step", rank)
        }
        for event in gathered:
            assert event["ts"] >= optimizer[event["args"]["step"]]["ts"]


def check_accumulation_compression_validation_and_checkpoints(tmp_path):
    path = tmp_path / "trace.json"
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    train(
        RingStrategy(timeline=path, compression="bf16", force_communication=True),
        val=loader(8 * SIZE),
        accumulate_grad_batches=2,
        max_epochs=2,
        callbacks=[keep],
        enable_checkpointing=True,
    )
    events = read_trace(path)
    for rank in range(SIZE):
        assert steps_of(events, rank) == list(range(12))
        for track in ("gradients of bucket 0", "optimizer step"):
            assert steps_of(events, rank, track) == list(range(1, 12, 2))
        pauses = [event["name"] for event in slices(events, "validation and checkpoints", rank)]
        assert pauses.count("checkpoint") == 3
        assert pauses.count("validation batch") >= 4
        for pause in slices(events, "validation and checkpoints", rank):
            for step in slices(events, "steps", rank):
                assert (
                    pause["ts"] + pause["dur"] <= step["ts"]
                    or step["ts"] + step["dur"] <= pause["ts"]
                )


def check_fits_of_one_script_are_numbered_and_a_run_replaces_the_last(tmp_path):
    path = tmp_path / "trace.json"
    if RANK == 0:
        old = (
            '{"displayTimeUnit":"ms","otherData":{"generator":"lightning_ring"},'
            '"traceEvents":[\n\n]}\n'
        )
        for stale in ("trace.json", "trace.rank7.jsonl", "trace-3.json"):
            (tmp_path / stale).write_text(old)
        (tmp_path / "trace-mine.json").write_text("{}")
    WORLD.Barrier()
    with environment(RING_TIMELINE=str(path)):
        train(RingStrategy(), batches=2)
        train(RingStrategy(), batches=3)
    assert [
        len(steps_of(read_trace(tmp_path / f"{name}.json"), 0)) for name in ("trace", "trace-2")
    ] == [2, 3]
    names = {file.name for file in tmp_path.iterdir()}
    assert "trace-mine.json" in names, "no timeline: left alone"
    assert not names & {"trace.rank7.jsonl", "trace-3.json"}
    assert not [name for name in names if name.endswith(".part")]


def check_the_environment_of_rank_0_counts(tmp_path):
    """Plain mpirun hands no variables to other hosts: all ranks start, or none."""
    path, other = tmp_path / "trace.json", tmp_path / "other.json"
    with environment(**({"RING_TIMELINE": str(path)} if RANK == 0 else {})):
        strategy = RingStrategy()
    train(strategy, batches=2)
    assert all(steps_of(read_trace(path), rank) == [0, 1] for rank in range(SIZE))
    with environment(**({"RING_TIMELINE": str(other)} if RANK == SIZE - 1 and SIZE > 1 else {})):
        strategy = RingStrategy()
    train(strategy, batches=2)
    assert not other.exists()


def check_an_unwritable_path_is_one_error_before_the_first_step(tmp_path):
    if RANK == 0:
        (tmp_path / f"trace.rank{SIZE - 1}.jsonl").mkdir()  # what only the last rank cannot replace
    WORLD.Barrier()
    module, strategy = Classifier(), RingStrategy(timeline=tmp_path / "trace.json")
    with raised_by_all(ConfigurationError, rf"written \(rank {SIZE - 1}: .*Is a directory"):
        train(strategy, module=module)
    assert module.seen["loss"] == []
    WORLD.Barrier()
    assert [file.name for file in tmp_path.iterdir()] == [f"trace.rank{SIZE - 1}.jsonl"]


class Between(L.Callback):
    """Records from batch 2 to batch 5, by hand."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        timeline = trainer.strategy.timeline
        if batch_idx == 2:
            timeline.start(self.path)
            timeline.start()  # it is on
            assert timeline.recording
        if batch_idx == 5:
            timeline.stop()
            timeline.stop()
            assert not isinstance(trainer.profiler, StepTimer)
            assert not trainer.strategy.listeners


def check_started_and_stopped_by_hand(tmp_path):
    path = tmp_path / "trace.json"
    strategy = RingStrategy(force_communication=True, monitor=False)
    with refused("without a path"):
        strategy.timeline.start()
    with refused("outside a fit"):
        strategy.timeline.start(path)
    train(strategy, batches=8, callbacks=[Between(path)])
    events = read_trace(path)
    assert steps_of(events, SIZE - 1) == [2, 3, 4]
    assert steps_of(events, 0, "gradients of bucket 0") == [2, 3, 4]


def check_a_largest_size(tmp_path):
    class Chatty(Between):
        def on_train_batch_end(self, trainer, *_):
            recording = trainer.strategy.timeline._session
            for _ in range(7000 if recording else 0):
                recording.recorder.slice(1, "step", 0.0, 0.0)

    short = partial(TraceFile, max_bytes=2**20)
    with mock.patch.object(session, "TraceFile", short), said() as messages:
        train(RingStrategy(monitor=False), batches=8, callbacks=[Chatty(tmp_path / "trace.json")])
    assert len([message for message in messages if "largest size" in message]) == 1
    assert 0 < (tmp_path / f"trace.rank{RANK}.jsonl").stat().st_size <= 2**20
    assert read_other(tmp_path / f"trace.rank{RANK}.jsonl")["dropped"]
