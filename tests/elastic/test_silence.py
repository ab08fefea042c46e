"""Members that are silent, connections that say nothing, and a steward that is out of file
descriptors.
"""

import pytest

from lightning_ring.elastic.member import Member
from lightning_ring.elastic.membership import Membership, Report
from lightning_ring.elastic.steward import Silence, SilenceLimits
from lightning_ring.errors import RankDiscoveryError
from tests.elastic.serving import WAIT, first_view
from tests.processes import wait_for

LIMITS = SilenceLimits(answer=10.0, start=50.0, report=100.0)


class Clock:
    """Looks at ``silence`` four times a second, as the steward does more often."""

    def __init__(self, silence, membership):
        self.silence, self.membership, self.now = silence, membership, 0.0

    def pass_seconds(self, seconds):
        found = {}
        until = self.now + seconds
        while self.now < until:
            self.now += 0.25
            found |= self.silence.look(self.now, self.membership)
        return found


def members(count):
    membership = Membership()
    for member in range(count):
        membership.expect(member)
    for member in range(count):
        membership.report(member, -1, Report())
    assert membership.next_view() is not None
    return membership


def test_whoever_neither_answers_nor_computes_is_found():
    idle = {0: 0.0, 1: 0.0}
    clock = Clock(Silence(LIMITS, idle.__getitem__), members(2))
    clock.silence.heard(0)
    clock.silence.heard(1)
    idle[0] = 60.0  # it sleeps, and its thread answers
    for _ in range(30):
        clock.silence.heard(0)
        assert clock.pass_seconds(1) == {}
    idle[1] = 11.0  # it was busy in C before
    assert clock.pass_seconds(0.25) == {
        1: "it has neither answered nor used processor time for 11 s (stopped, or hung)"
    }


def test_the_absence_of_the_steward_is_nobodys_silence():
    clock = Clock(Silence(LIMITS, lambda member: 1e9), members(2))
    clock.silence.heard(1)
    clock.pass_seconds(1)
    clock.now += 3600.0  # it was stopped
    assert clock.pass_seconds(5) == {}
    assert list(clock.pass_seconds(5)) == [1]


def test_whoever_is_busy_may_keep_the_others_waiting_for_so_long_only():
    membership = members(3)
    clock = Clock(Silence(LIMITS, lambda member: 0.0), membership)
    assert clock.pass_seconds(500) == {}
    membership.fenced(2)  # the view is over, and both compute: nobody waits
    assert membership.stopping
    assert clock.pass_seconds(500) == {}
    membership.report(0, 0, Report(3))
    assert clock.pass_seconds(99) == {}
    (why,) = clock.pass_seconds(1.5).values()
    assert why.startswith("the other ranks have waited for it for 10")


def test_a_process_that_hangs_before_it_connects_is_found_once_another_one_is_ready():
    membership, idle = Membership(), {0: 0.0, 1: 1e9}
    for member in range(2):
        membership.expect(member)
    clock = Clock(Silence(LIMITS, idle.__getitem__), membership)
    assert clock.pass_seconds(500) == {}
    membership.report(0, -1, Report())
    assert clock.pass_seconds(49) == {}
    assert list(clock.pass_seconds(2)) == [1]
    idle[1] = 20.0  # it reads data
    assert clock.pass_seconds(500) == {}


def test_a_second_process_with_a_number_that_is_taken_and_a_stranger_are_refused(server):
    (one,) = first_view(server, 1)
    told = r"process 0 of the job is process \d+ already.*start it without"
    with pytest.raises(RankDiscoveryError, match=told):
        Member(server.steward.variables(0)).open()
    with pytest.raises(RankDiscoveryError, match="process 7 of the job takes part no more"):
        Member(server.steward.variables(7)).open()
    with pytest.raises(RankDiscoveryError, match="another job"):
        Member(server.steward.variables(0) | {"RING_SECRET": "guess"}).open()
    assert one.request({"op": "count"}, WAIT) == 0
    assert server.steward.membership.members == [0]


def test_who_connects_anew_is_named_and_not_taken_for_a_newcomer(server):
    one, two = first_view(server, 2)
    one.report(Report(2))
    assert two.is_over(WAIT)
    with pytest.raises(Exception, match="process 0 connects anew"):
        two.check()


def test_the_failure_of_a_process_that_was_in_no_view_does_not_end_the_job(server):
    (one,) = first_view(server, 1)
    two = server.join(1)
    two.fail("process 1 failed: RuntimeError: no GPU here")
    wait_for(lambda: 1 in server.steward.last_words, WAIT)
    assert server.steward.ended is None
    one.check()
