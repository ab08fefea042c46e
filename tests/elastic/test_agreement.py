"""What counts after an interruption, and who is in the next view: no sockets, no processes."""

import itertools
import json
import random

import pytest

from lightning_ring.elastic.membership import (
    DisagreementError,
    Membership,
    Report,
    StateLostError,
    View,
    agreed_step,
)

DONE, BEHIND, FULL = Report(7), Report(6), Report(6, complete=True)
BETWEEN = Report(5, between=True)


@pytest.mark.parametrize(
    ("reports", "step"),
    [
        ([FULL, DONE], 7),  # one has finished: the other finishes too
        ([DONE, DONE], 7),
        ([FULL, FULL], 7),  # nobody has, and all can
        ([FULL, BEHIND], 6),  # one cannot: all do it again
        ([BEHIND, BEHIND], 6),
        ([Report(None), DONE, FULL], 7),
        ([Report(None), Report(None)], None),
        ([Report(0)], 0),
    ],
)
def test_the_step_that_counts(reports, step):
    for order in itertools.permutations(reports):
        assert agreed_step(dict(enumerate(order))) == step


@pytest.mark.parametrize("reports", [[DONE, BEHIND], [Report(8), FULL], [Report(8, True), BEHIND]])
def test_a_rank_that_cannot_follow_is_named(reports):
    with pytest.raises(
        DisagreementError, match=r"finished step \d, and ranks \[1\] cannot finish it"
    ):
        agreed_step(dict(enumerate(reports)))


def opened(members, **limits):
    membership = Membership(**limits)
    for member in range(members):
        membership.expect(member)
    for member in range(members):
        assert membership.next_view() is None
        membership.report(member, -1, Report())
    assert membership.next_view() == View(0, tuple(range(members)))
    return membership


def test_the_next_view_waits_for_reports_and_until_the_dead_are_seen_to_be_dead():
    membership = opened(3)
    assert membership.next_view() is None
    assert membership.remove(0)
    assert not membership.remove(0)
    membership.report(1, 0, Report(4))
    membership.report(2, 0, Report(3, complete=True))
    assert membership.next_view() is None  # it may still write into shared memory
    membership.fenced(0)
    assert membership.next_view() == View(1, (1, 2), 4)
    membership.report(0, 1, Report(9))  # removed for good
    assert membership.next_view() is None
    assert membership.members == [1, 2]


def test_newcomers_wait_until_all_members_are_between_steps_and_follow_them():
    membership = opened(2, max_ranks=3)
    membership.expect(2)
    assert not membership.admits
    for newcomer in (3, 2):
        membership.report(newcomer, -1, Report())
    assert membership.admits
    assert membership.next_view() is None
    membership.report(1, 0, BETWEEN)
    membership.report(0, 0, Report(5))  # it has begun another one
    assert membership.next_view() == View(1, (0, 1), 5)
    assert membership.admits
    for member in (0, 1):
        membership.report(member, 1, BETWEEN)
    assert membership.next_view() == View(2, (0, 1, 2), 5, (2,))
    assert not membership.admits  # no room for process 3
    membership.fenced(0)
    membership.report(1, 2, Report(5))
    membership.report(2, 2, Report())  # process 0 had yet to send it the state
    assert membership.next_view() == View(3, (1,), 5)
    membership.report(1, 3, BETWEEN)
    assert membership.next_view() == View(4, (1, 2, 3), 5, (2, 3))


def test_reports_of_an_earlier_generation_do_not_count():
    membership = opened(2)
    membership.report(0, -1, Report())
    assert not membership.stopping
    membership.fenced(1)
    membership.report(0, 0, Report(0))
    assert membership.next_view() == View(1, (0,), 0)


def test_too_few_ranks_wait_for_others():
    membership = opened(2, min_ranks=2)
    membership.fenced(1)
    assert not membership.below_min_ranks
    membership.report(0, 0, BETWEEN)
    assert membership.below_min_ranks
    assert membership.next_view() is None
    membership.report(2, -1, Report())
    assert membership.next_view() == View(1, (0, 2), 5, (2,))


def test_too_few_ranks_meet_once_more_where_each_has_a_part_of_the_state():
    whole, parted = opened(3, min_ranks=3), opened(3, min_ranks=3)
    for membership, parts in ((whole, False), (parted, True)):
        membership.fenced(2)
        membership.report(0, 0, Report(5, parted=parts))
        membership.report(1, 0, Report(5, parted=parts))
        membership.report(3, -1, Report(parted=parts))  # a newcomer has no part of it
        membership.remove(3)
        membership.fenced(3)
        assert membership.below_min_ranks
    assert not whole.end_with_last_view("too few")
    assert whole.next_view() is None
    assert parted.end_with_last_view("too few")
    assert parted.next_view() == View(1, (0, 1), 5, (), "too few")
    assert not parted.last_word
    parted.fenced(0)
    parted.report(1, 1, Report(5, parted=True))  # it had not put all together yet
    assert parted.next_view() == View(2, (1,), 5, (), "too few")
    parted.fenced(1)
    assert parted.last_word == "too few"


def test_state_that_died_with_its_ranks_is_not_replaced_by_none():
    membership = opened(1)
    membership.report(0, 0, Report(5))
    membership.next_view()
    membership.report(1, -1, Report())
    membership.fenced(0)
    with pytest.raises(StateLostError, match="the 1 that wait have none"):
        membership.next_view()


def test_who_has_finished_is_not_waited_for():
    membership = opened(2)
    membership.finish(0)
    assert not membership.finished
    membership.fenced(1)
    assert membership.finished


@pytest.mark.parametrize("order", ["leave dies", "dies leave"])
def test_a_death_after_a_rank_has_left_its_fit_is_no_end_of_the_training(order):
    """The rank that has left cannot take the place of the dead one, in no further view."""
    membership = opened(3)
    for what in order.split():
        if what == "leave":
            membership.leave_fit(0, True)
        else:
            membership.fenced(2)
    membership.report(1, 0, Report(5))
    membership.finish(0)
    assert membership.late == {2}
    assert membership.takes_no_more
    assert membership.next_view() is None
    membership.finish(1)
    assert not membership.finished


def test_a_death_in_another_fit_is_survived():
    membership = opened(2)
    membership.leave_fit(0, True)
    membership.leave_fit(0, False)
    membership.fenced(1)
    membership.report(0, 0, Report(5))
    assert membership.next_view() == View(1, (0,), 5)


def test_a_newcomer_is_a_member_once_it_has_finished_a_step():
    membership = opened(1)
    membership.report(1, -1, Report())
    membership.report(0, 0, BETWEEN)
    assert membership.next_view() == View(1, (0, 1), 5, (1,))
    assert [membership.was_member(member) for member in (0, 1)] == [True, False]
    assert membership.knows(1)
    membership.take_part(1)
    assert membership.was_member(1)


@pytest.mark.parametrize("seeds", [range(100), range(100, 200)], ids=str)
def test_one_history_whatever_happens_in_which_order(seeds):
    for seed in seeds:
        live_through(seed)


def live_through(seed):
    """Ranks as the protocol has them: averages, a barrier that all must reach, then the step.
    Deaths at any point.
    """
    draws = random.Random(seed)
    membership, numbers = opened(4), itertools.count(4)
    steps = dict.fromkeys(range(4), 0)
    most = 0
    for _ in range(30):
        view = membership.view
        alive = membership.members
        for _ in range(draws.randrange(3)):  # whole steps
            steps = dict.fromkeys(alive, steps[alive[0]] + 1)
        complete = {member: draws.random() < 0.7 for member in alive}
        finished = {member: all(complete.values()) and draws.random() < 0.5 for member in alive}
        for member in alive:
            steps[member] += finished[member]
        most = max(most, *steps.values())
        events = [("report", member) for member in alive]
        events += [("die", member) for member in draws.sample(alive, draws.randrange(len(alive)))]
        events += (
            [("join", next(numbers)) for _ in range(draws.randrange(3))] if len(alive) < 6 else []
        )
        draws.shuffle(events)
        between = draws.random() < 0.7
        for kind, member in events:
            if kind == "report":
                membership.report(
                    member,
                    view.generation,
                    Report(
                        steps[member], complete[member] and not finished[member], between=between
                    ),
                )
            elif kind == "die":
                membership.fenced(member)
            else:
                membership.report(member, -1, Report())
        new = membership.next_view()
        assert most <= new.step <= most + 1
        assert between or not new.newcomers
        for member in new.members:
            if member not in new.newcomers:
                assert new.step in (steps[member], steps[member] + complete[member])
            steps[member] = new.step
        most = new.step


def test_the_training_begins_with_the_ranks_that_are_there_when_all_are_connected():
    membership = opened(3)
    membership.fenced(2)  # while the first view connects
    membership.fenced(1)
    membership.report(3, -1, Report())  # and with those that have come in their place
    membership.report(0, 0, Report())
    assert membership.next_view() == View(1, (0, 3))
    assert membership.first_ranks == 2
    membership.report(4, -1, Report())
    membership.report(0, 1, Report(0))  # it was connected, and process 3 was not
    membership.report(3, 1, Report())
    assert membership.next_view() == View(2, (0, 3), 0, (3,))
    membership.fenced(3)
    membership.report(0, 2, Report(5))
    assert membership.next_view() == View(3, (0,), 5)
    assert membership.first_ranks == 2


def test_a_view_of_thousands_of_ranks_is_a_short_message():
    members = (*range(2000), *range(2002, 4096), 2001)
    view = View(3, members, 7, newcomers=(2001,))
    text = json.dumps(view.as_message())
    assert len(text) < 200
    assert View.from_message(json.loads(text)) == view
    assert View.from_message(View(0, (), None).as_message()) == View(0, (), None)
