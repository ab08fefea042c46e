"""What is concluded from steps and rows that are made up, so that every number is known."""

import math

import pytest
import torch

from lightning_ring.comm.recording import CollectiveRecord
from lightning_ring.monitor.ring_monitor import first_dimension
from lightning_ring.monitor.ring_report import RankMemory, RankRow, RingReport
from lightning_ring.monitor.step_times import (
    StepRecord,
    StepTimes,
    break_down,
    collective_times,
    sent_bytes,
)


def step(**marks):
    """Of 30 s, from 100 on."""
    record = StepRecord()
    record.began, record.total = 100.0, 30.0
    for phase, (begin, end) in marks.items():
        record.begin(phase, 100.0 + begin)
        record.end(phase, 100.0 + end)
    return record


def collective(called, returned, waited, ended, kind="all_reduce", name="a"):
    record = CollectiveRecord(name, kind, nbytes=8, called=100 + called, returned=100 + returned)
    record.waited_from, record.waited_until, record.ended = (
        100 + waited[0],
        100 + waited[1],
        100 + ended,
    )
    return record


AUTOMATIC = {
    "data": (0.0, 2.0),
    "forward": (3.0, 9.0),
    "backward": (9.0, 21.0),
    "optimizer": (2.5, 26.0),
}


def test_collectives_come_out_of_the_phase_in_which_they_cost_time():
    record = step(**AUTOMATIC)
    told = [
        # under way 12 to 19.5: lost 0.5 in backward, then 2
        collective(12, 12.5, (18, 20), ended=19.5),
        collective(14, 14, (20, 20.5), ended=20.5),  # waits for the one before: 19.5 to 20.5
        # called in the step before; lost 1 in forward
        collective(-3, -2, (4, 5), ended=1, kind="all_gather"),
        collective(31, 31, (31, 32), ended=32),  # of a validation
    ]
    found = break_down(record, reversed(told), world_size=4)
    assert found.exposed == pytest.approx(0.5 + 2 + 0.5 + 1)
    assert found.backward == pytest.approx(12 - 3)
    assert found.forward == pytest.approx(6 - 1)
    assert found.optimizer == pytest.approx(23.5 - 6 - 12)
    assert found.busy == pytest.approx(4 + 7.5 + 1)
    assert found.hidden == pytest.approx(12.5 - 4)
    parts = (
        found.data,
        found.copy,
        found.forward,
        found.backward,
        found.exposed,
        found.optimizer,
        found.other,
    )
    assert sum(parts) == pytest.approx(found.total) == 30
    assert found.sent == pytest.approx(2 * (2 * 3 / 4 * 8) + 3 / 4 * 8)


def test_time_in_which_two_collectives_overlap_counts_once():
    told = [
        collective(10, 10, (21, 23), ended=16),
        collective(11, 11, (23, 24), ended=15),  # in another lane: over before the first
        collective(12, 12, (24, 24.5), ended=17),
        collective(19, 19, (24.5, 24.5), ended=20),
    ]
    found = break_down(step(**AUTOMATIC), told, world_size=2)
    assert found.busy == pytest.approx(7 + 1), "10 to 17, and 19 to 20"
    assert found.exposed == pytest.approx(2 + 1 + 0.5)
    assert [(began - 100, ended - 100) for began, ended, _ in collective_times(told)] == [
        (10, 16),
        (15, 15),
        (16, 17),
        (19, 20),
    ]


def test_backward_of_manual_optimization_comes_out_of_forward_and_out_of_a_closure():
    record = step()
    marks = ("backward", 2, 5), ("backward", 7, 11), ("optimizer", 6, 12), ("forward", 0, 20)
    for phase, begin, end in marks:
        record.begin(phase, 100.0 + begin)
        record.end(phase, 100.0 + end)
    times = record.times()
    assert (times.forward, times.backward, times.optimizer) == pytest.approx(
        (20 - 3 - 6, 3 + 4, 6 - 4)
    )
    assert [record.phase_at(100.0 + at) for at in (1, 3, 6.5, 8, 25, 31)] == [
        "forward", "backward", "optimizer", "backward", "other", None,
    ]  # fmt: skip


class Event:
    """Of a GPU, at a time of its own clock, in seconds."""

    def __init__(self, at):
        self.at = at

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)

    def query(self):
        return True


def test_on_a_gpu_events_tell_the_times_of_phases_and_collectives():
    record = step(data=(0.0, 2.0))
    for phase, begin, end in (("forward", 1, 5), ("backward", 5, 13), ("optimizer", 0.5, 16)):
        record.begin(phase, Event(begin))
        record.end(phase, Event(end))
    one = collective(20, 20.1, (21, 21.1), 0)
    one.ended, one.events, one.wait_event = None, (Event(8), Event(14)), Event(13)
    found = break_down(record, [one], world_size=2)
    known = {"data": 2, "forward": 4, "backward": 7, "optimizer": 3.5, "exposed": 1, "busy": 6}
    assert found == found._replace(**known)


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("all_reduce", 12),
        ("reduce_scatter", 6),
        ("broadcast", 8),
    ],
)
def test_bytes_are_counted_as_nccl_tests_do(kind, sent):
    assert sent_bytes(collective(0, 0, (0, 0), 0, kind=kind), world_size=4) == sent


def row(rank, total, exposed, images=32, data_share=0.1):
    times = StepTimes(
        data=data_share * total,
        exposed=exposed,
        total=total,
        busy=1.0,
        sent=6e9,
        images=images,
        steps=10,
    )
    return RankRow(rank, 0, times, RankMemory(1e9 * (rank + 1)))


def test_the_slowest_rank_is_the_one_that_waits_least():
    report = RingReport(7, [row(0, 2.0, 0.5), row(1, 2.0, 0.1), row(2, 2.0, 0.6), row(3, 2.0, 0.4)])
    rank, behind = report.slowest
    assert (rank, behind) == (1, pytest.approx(1.9 - 1.5))
    assert report.bar() == {
        "img/s": "64",
        "data": "10%",
        "comm": "20%",
        "slowest": "rank 1 +400 ms",
    }
    scalars = report.scalars()
    assert scalars["ring/images_per_second"] == pytest.approx(64)
    assert [name for name in scalars if "slowest_rank" in name] == [
        "ring/slowest_rank_behind_ms/rank_1"
    ]
    assert scalars["ring/slowest_rank_behind_ms/rank_1"] == pytest.approx(400)
    assert scalars["ring/memory_gb"] == 4
    assert "ring/cuda_peak_gb" not in scalars


def test_the_share_of_data_is_that_of_the_rank_that_holds_the_others_up():
    """One loader is late, and seven ranks stand in the all-reduce; the mean would say 12 % of a
    step.
    """
    late = RingReport(
        0,
        [row(rank, 2.0, 1.5, data_share=0.01) for rank in range(7)]
        + [row(7, 2.0, 0.0, data_share=0.9)],
    )
    assert late.data_share == late.scalars()["ring/data_share"] == pytest.approx(0.9)
    assert (late.bar()["data"], late.bar()["slowest"]) == ("90%", "rank 7 +1500 ms")
    assert late.scalars()["ring/data_ms"] == pytest.approx(2000 * (7 * 0.01 + 0.9) / 8), (
        "parts stay means: they add up"
    )
    # rank 0 waits for data while rank 1 computes, which takes longer: better data would change
    # nothing
    hidden = RingReport(0, [row(0, 2.0, 0.5, data_share=0.5), row(1, 2.0, 0.0, data_share=0.0)])
    assert hidden.data_share == 0
    assert hidden.scalars()["ring/data_ms_slowest"] == 1000


def test_what_cannot_be_told_is_left_out_and_a_norm_that_is_not_finite_is_not():
    unknown = RankRow(0, 0, StepTimes.unknown(), RankMemory(1))
    report = RingReport(0, [unknown, row(1, 2.0, 0.5)], gradient_norms=[math.nan, None, 2.0])
    scalars = report.scalars()
    assert not [name for name in scalars if "ms" in name or "images" in name or "slowest" in name]
    assert math.isnan(scalars["ring/gradient_norm/0"])
    assert "ring/gradient_norm/1" not in scalars
    assert scalars["ring/gradient_norm/2"] == 2
    assert report.bar() == {}
    nameless = RingReport(0, [row(0, 2.0, 0.5, images=math.nan)])
    assert "img/s" not in nameless.bar()
    assert "ring/step_ms" in nameless.scalars()


def test_trust_ratios_are_told_by_percentiles():
    scalars = RingReport(0, [row(0, 1.0, 0.0)], trust_ratios=torch.arange(101.0)).scalars()
    assert [
        scalars[f"ring/trust_ratio/p{percent}"] for percent in ("05", "50", "95")
    ] == pytest.approx([5, 50, 95])


def test_batch_size_is_the_first_tensors_length():
    images = [torch.ones(7, 3), torch.ones(9)]
    assert first_dimension({"scale": torch.tensor(1.0), "images": images}) == 7
    with pytest.raises(TypeError, match="Give the callback batch_size="):
        first_dimension(["no", "tensor"])
