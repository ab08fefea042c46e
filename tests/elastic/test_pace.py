"""When a process that catches up is given up."""

from __future__ import annotations

import pytest

from lightning_ring.elastic.catch_up import pace
from lightning_ring.elastic.catch_up.pace import SECONDS, STEPS, SendingPace


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pace, "time", clock)
    return clock


def steps(clock: Clock, number: int, seconds: float, state: int, gradients: int) -> list[bool]:
    """What each of so many steps finds, in which so many bytes are sent, and which take so many
    seconds together.
    """
    pace, found = SendingPace(), []
    for _ in range(number):
        clock.now += seconds / number
        pace.sent(state, is_state=True)
        pace.sent(gradients, is_state=False)
        found.append(pace.step())
    return found


def test_gradients_that_leave_no_room_end_it_after_steps_and_seconds(clock: Clock) -> None:
    assert steps(clock, STEPS, 1.01 * SECONDS, 0, 100) == [*(STEPS - 1) * [False], True]
    assert steps(clock, 10 * STEPS, 1.01 * SECONDS, 0, 100)[-1]
    assert not any(steps(clock, 10 * STEPS, 0.9 * SECONDS, 0, 100))
    assert not any(steps(clock, STEPS - 1, 10 * SECONDS, 0, 100))


def test_a_tenth_of_what_is_sent_is_enough(clock: Clock) -> None:
    assert not any(steps(clock, 2 * STEPS, 2.1 * SECONDS, 10, 90))
    assert steps(clock, STEPS, 1.01 * SECONDS, 10, 91)[-1]


def test_a_message_that_takes_long_is_no_reason(clock: Clock) -> None:
    """A piece of state on a slow link: nothing has been sent to its end."""
    assert not any(steps(clock, 3 * STEPS, 3.1 * SECONDS, 0, 0))


def test_each_look_is_at_what_came_after_the_last(clock: Clock) -> None:
    pace, looks = SendingPace(), []
    pace.sent(10**9, is_state=True)
    for _ in range(2 * STEPS):
        clock.now += 1.01 * SECONDS / STEPS
        pace.sent(100, is_state=False)
        looks.append(pace.step())
    assert [number for number, hopeless in enumerate(looks, 1) if hopeless] == [2 * STEPS]
