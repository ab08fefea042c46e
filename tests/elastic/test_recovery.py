"""The order of what a rank does when its view is over, with a member, connections and a training
that only record.
"""

import threading
import weakref
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest

from lightning_ring.elastic.membership import GenerationOver, JobEnded, Report, View
from lightning_ring.elastic.recovery import EnterAgain, Recovery
from lightning_ring.errors import (
    CollectiveError,
    ConfigurationError,
    ModelMismatchError,
    PeerFailedError,
)

OVER = GenerationOver("generation 0 is over")


class Recorder:
    """Member, `Generations` and `Training` in one. ``opens`` raise what is in it, one a call."""

    number = 0
    newcomers_wait = False
    enters_again = False
    communicator = SimpleNamespace(barrier=lambda: None)

    def __init__(self, *views, over=True, opens=(), step=None):
        self.calls = []
        self.views, self.over, self.opens = list(views), over, list(opens)
        self.recovery = Recovery(self, self, self)
        self.recovery.step = step

    def is_over(self, seconds=0.0):
        return self.over

    def close(self, error):
        self.calls.append("close")

    def report(self, report):
        self.calls.append(report)

    def next_view(self, timeout):
        if not self.views:
            raise JobEnded("no view is left")
        return self.views.pop(0)

    def open(self, view):
        self.calls.append(f"open {view.generation}")
        if self.opens and (error := self.opens.pop(0)) is not None:
            raise error
        return "communicator"

    def is_between(self, first_attempt):
        return first_attempt

    def take_part(self):
        self.calls.append("take part")

    def turn_away(self, newcomers):
        self.calls.append(("turn away", *newcomers))

    def commit(self):
        self.calls.append("commit")

    def take_back(self):
        self.calls.append("take back")

    def enter(self, view, comm):
        self.calls.append(f"enter {view.generation}")
        return self.enters_again


def test_a_step_that_is_done_again_is_taken_back_before_state_is_sent():
    ranks = Recorder(View(1, (0, 2), 5), step=5)
    ranks.recovery.after(OVER)
    assert ranks.calls == ["close", Report(5, False), "take back", "open 1", "enter 1"]
    assert ranks.recovery.step == 5


def test_a_step_that_others_have_finished_is_finished_first_and_once():
    ranks = Recorder(View(1, (0, 2), 6), View(2, (0,), 6), opens=(OVER, None))
    ranks.recovery.step, ranks.recovery.complete = 5, True
    ranks.recovery.after(OVER)
    first, second = (
        ["close", Report(5, True), "commit", "open 1"],
        ["close", Report(6, False), "take back", "open 2"],
    )
    assert ranks.calls == [*first, *second, "enter 2"]
    assert ranks.recovery.step == 6


def test_what_a_broken_step_held_is_free_when_ranks_connect():
    """Else every bucket of shared memory is made anew: 0.7 s for 256 MiB of three ranks."""
    ranks = Recorder(View(1, (0, 2), 5), step=5)
    held = []
    free = []

    def wait_for_averages():
        bucket = Mock()
        held.append(weakref.ref(bucket))
        raise OVER

    def backward():
        try:
            wait_for_averages()
        except GenerationOver as error:
            raise CollectiveError("a transport is broken") from error

    with patch.object(ranks, "open", lambda view: free.append(held[0]() is None)):
        try:
            backward()
        except CollectiveError as error:
            ranks.recovery.after(error)
    assert free == [True]


def test_errors_that_are_each_others_context_do_not_hold_up_the_recovery():
    ranks = Recorder(View(1, (0, 2), 5), step=5)
    first, second = CollectiveError("first"), CollectiveError("second")
    first.__cause__, second.__cause__ = second, first
    done = threading.Event()

    def recover():
        ranks.recovery.after(first)
        done.set()

    threading.Thread(target=recover, daemon=True).start()
    assert done.wait(20)


def test_a_generator_that_handled_the_error_goes_on():
    def batches():
        try:
            yield "batch 0"
        except CollectiveError:
            yield "handled"
        yield "batch 1"

    ranks = Recorder(View(1, (0, 2), 5), step=5)
    error, source = CollectiveError("a transport is broken"), batches()
    next(source)
    assert source.throw(error) == "handled"
    ranks.recovery.after(error)
    assert next(source) == "batch 1"


def test_a_newcomer_has_state_only_once_it_has_entered():
    ranks = Recorder(
        View(3, (0, 4), 7, (4,)),
        View(4, (1, 4), 7, (4,)),
        opens=(PeerFailedError("rank 0 died"), None),
    )
    ranks.number, ranks.enters_again = 4, True
    with pytest.raises(EnterAgain):
        ranks.recovery.start()
    assert [call for call in ranks.calls if isinstance(call, Report)] == [
        Report(None),
        Report(None),
    ]
    assert ranks.recovery.step == 7


@pytest.mark.parametrize("others", ["are here", "are further"])
def test_newcomers_come_in_where_all_agreed_unless_a_rank_dies_meanwhile(others):
    ranks = Recorder(View(1, (0, 4), 5, (4,)), View(2, (0,), 5), opens=(OVER, None))
    ranks.recovery.step, ranks.enters_again = 5, True
    if others == "are further":  # out of the barrier, and have reported
        ranks.communicator = SimpleNamespace(barrier=Mock(side_effect=OVER))
    with pytest.raises(EnterAgain):
        ranks.recovery.pause()
    reports = [call for call in ranks.calls if isinstance(call, Report)]
    assert [report.between for report in reports] == [True, False]
    assert ranks.calls[-1] == "enter 2"


def test_connections_that_do_not_come_up_are_tried_again_a_few_times():
    ranks = Recorder(
        *(View(n, (0, 1), 0) for n in range(9)), over=False, opens=(TimeoutError("no key"),) * 9
    )
    with pytest.raises(TimeoutError):
        ranks.recovery.start()
    assert ranks.calls.count("close") == 5


@pytest.mark.parametrize(
    "error", [ModelMismatchError("other models"), ConfigurationError("other batches")]
)
def test_newcomers_that_do_not_fit_are_turned_away_and_the_others_go_on(error):
    views = View(1, (0, 4), 5, (4,)), View(2, (0,), 5)
    ranks = Recorder(*views, over=False, opens=(error, None), step=5)
    ranks.recovery.pause()
    assert ranks.calls.count(("turn away", 4)) == 1
    assert ranks.calls[-1] == "enter 2"
    newcomer = Recorder(views[0], over=False, opens=(error,))
    newcomer.number = 4
    with pytest.raises(JobEnded):
        newcomer.recovery.start()
    assert newcomer.calls[-1] == ("turn away", 4)


def test_newcomers_are_to_blame_for_an_error_in_their_first_step_and_no_later():
    error = CollectiveError("ranks called other collectives")
    ranks = Recorder(View(1, (0, 4), 5, (4,)), View(2, (0,), 5), over=False)
    ranks.recovery.step = 5
    ranks.recovery.pause()
    ranks.recovery.after(error)
    assert ("turn away", 4) in ranks.calls
    joined = Recorder(View(1, (0, 4), 5, (4,)), over=False)
    joined.number = 4
    joined.recovery.start()
    joined.recovery.committed()
    joined.recovery.committed()
    assert joined.calls.count("take part") == 1
    with pytest.raises(CollectiveError):
        joined.recovery.after(error)


@pytest.mark.parametrize(
    "error",
    [ValueError("no such column"), CollectiveError("other collectives"), JobEnded("too few ranks")],
)
def test_an_error_while_nobody_has_died_is_raised(error):
    ranks = Recorder(View(1, (0,), 1), over=isinstance(error, JobEnded))
    with pytest.raises(type(error)):
        ranks.recovery.after(error)
    assert ranks.calls == []
