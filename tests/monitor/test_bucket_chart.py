"""The picture of a step shows each part's own time, in the order in which a step goes."""

from __future__ import annotations

from lightning_ring.monitor.dashboard import bars
from lightning_ring.monitor.step_times import MANUAL, StepRecord


def drawn(marks: dict[str, list[tuple[float, float]]]) -> list[tuple[str, float, float]]:
    record = StepRecord()
    record.began, record.total, record.marks = 100.0, 20.0, {**marks}
    return [(bar.lane, bar.start, bar.stop) for bar in bars(record, [])]


def test_the_optimizer_is_drawn_without_the_forward_and_backward_inside_it() -> None:
    marks = {
        "optimizer": [(102.0, 112.0)],
        "backward": [(106.0, 110.0)],
        "forward": [(102.0, 106.0)],
    }
    marks |= {"copy": [(101.0, 102.0)], "data": [(100.0, 101.0)]}
    assert drawn(marks) == [
        ("data", 0.0, 1.0),
        ("copy", 1.0, 2.0),
        ("forward", 2.0, 6.0),
        ("backward", 6.0, 10.0),
        ("optimizer", 10.0, 12.0),
    ]


def test_a_closure_that_runs_twice_leaves_the_optimizer_what_lies_between_and_behind() -> None:
    marks = {"optimizer": [(100.0, 110.0)], "forward": [(100.0, 101.0), (104.0, 105.0)]}
    marks["backward"] = [(101.0, 103.0), (105.0, 107.0)]
    assert [bar for bar in drawn(marks) if bar[0] == "optimizer"] == [
        ("optimizer", 3.0, 4.0),
        ("optimizer", 7.0, 10.0),
    ]


def test_forward_is_drawn_without_a_manual_backward_and_optimizer() -> None:
    marks = {
        "forward": [(100.0, 110.0)],
        "manual_backward": [(102.0, 105.0)],
        MANUAL: [(106.0, 109.0)],
    }
    assert drawn(marks) == [
        ("forward", 0.0, 2.0),
        ("forward", 5.0, 6.0),
        ("forward", 9.0, 10.0),
        ("backward", 2.0, 5.0),
        ("optimizer", 6.0, 9.0),
    ]
