"""The steward and its members in one process: views, the store of a view, refusals, strangers."""

import threading

import pytest

from lightning_ring.elastic.membership import GenerationOver, JobEnded, Report, TooFewRanks
from lightning_ring.elastic.steward import KeyValue
from tests.elastic.serving import WAIT, first_view, serving
from tests.processes import wait_for


def test_a_death_stops_the_others_and_frees_who_waits_in_the_store(server):
    one, two, three = first_view(server, 3)
    stopped = threading.Event()
    two.on_stop = lambda error: stopped.set()
    freed = []

    def wait():
        try:
            one.request({"op": "get", "keys": ["never"]}, WAIT)
        except GenerationOver as error:
            freed.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    three.close()
    waiting.join(WAIT)
    assert "process 2 has died" in str(freed[0])
    assert stopped.wait(WAIT)
    with pytest.raises(GenerationOver, match="process 2 has died"):
        two.check()
    with pytest.raises(GenerationOver):
        two.request({"op": "set", "key": "a", "value": "b"}, WAIT)
    one.report(Report(3))
    two.report(Report(2, complete=True))
    for member in (one, two):
        view = member.next_view(WAIT)
        assert (view.generation, view.members, view.step) == (1, (0, 1), 3)
        member.check()


def test_members_share_the_store_and_each_view_begins_with_an_empty_one(server):
    one, two = first_view(server, 2)
    assert one.request({"op": "add", "key": "n", "value": 2}, WAIT) == 2
    assert two.request({"op": "add", "key": "n", "value": 3}, WAIT) == 5
    assert one.request({"op": "count"}, WAIT) == 1
    with pytest.raises(GenerationOver, match="no operation 'sing'"):
        one.request({"op": "sing"}, WAIT)
    with pytest.raises(TimeoutError, match=r"none in 0\.05 s"):
        one.request({"op": "wait", "keys": ["never"]}, 0.05)
    two.close()
    one.report(Report(0))
    one.next_view(WAIT)
    assert one.request({"op": "count"}, WAIT) == 0


def test_a_newcomer_is_announced_and_let_in_when_the_members_stop(server):
    (one,) = first_view(server, 1)
    two = server.join(1)
    two.report(Report())
    with pytest.raises(JobEnded, match=r"no next view of the ranks within 0\.1 s"):
        two.next_view(0.1)
    assert one.newcomers_wait
    one.check()  # it goes on until it stops by itself
    one.report(Report(7))  # in the middle of a step
    wait_for(lambda: one._next and server.steward._told_of_newcomers, WAIT)
    assert one.next_view(WAIT).members == (0,)
    wait_for(lambda: one.newcomers_wait, WAIT)
    one.report(Report(8, between=True))
    for member in (one, two):
        view = member.next_view(WAIT)
        assert (view.members, view.step, view.newcomers) == ((0, 1), 8, (1,))
    assert not one.newcomers_wait


def test_who_waits_for_a_rank_that_died_after_the_fit_is_told_so(server):
    one, two = first_view(server, 2)
    for member in (one, two):
        member.leave_fit()
    wait_for(lambda: len(server.steward.membership._outside) == 2, WAIT)
    two.close()
    assert one.is_over(WAIT)
    with pytest.raises(GenerationOver, match="process 1 has died after the training had ended: "):
        one.check()


def test_a_newcomer_that_does_not_fit_is_removed_and_a_member_is_not(server):
    (one,) = first_view(server, 1)
    two = server.join(1)
    two.report(Report())
    wait_for(lambda: one.newcomers_wait, WAIT)
    one.report(Report(8, between=True))
    for member in (one, two):
        member.next_view(WAIT)
    two.turn_away([0])
    one.turn_away([1])
    with pytest.raises(JobEnded, match="for process 1, which does not fit the others"):
        two.next_view(WAIT)
    assert one.is_over(WAIT)
    one.report(Report(8))
    assert one.next_view(WAIT).members == (0,)
    assert server.steward.turned_away == {1}


def test_a_failure_ends_the_job_on_every_rank(server):
    one, two = first_view(server, 2)
    one.fail("rank 0 failed: ValueError: no such file")
    assert two.is_over(WAIT)
    # at once: its key may be one that `one` owes
    with pytest.raises(JobEnded, match="ValueError: no such file"):
        two.request({"op": "wait", "keys": ["address of one"]}, WAIT)
    two.report(Report(1))
    with pytest.raises(JobEnded, match="ValueError: no such file") as ended:
        two.next_view(WAIT)
    assert not ended.value.finished
    assert not isinstance(ended.value, TooFewRanks)


def test_a_failure_that_follows_from_a_late_death_leaves_the_last_word_to_the_launcher(server):
    one, two, three = first_view(server, 3)
    for member in (one, two, three):
        member.take_part()
    three.leave_fit()
    wait_for(lambda: server.steward.membership.takes_no_more, WAIT)
    two.close()
    wait_for(lambda: server.steward.membership.late, WAIT)
    one.fail("rank 0 failed: GenerationOver: process 1 has died")
    wait_for(lambda: 0 in server.steward.last_words, WAIT)
    assert server.steward.ended is None
    server.calls.append(lambda: server.steward.end("process 1 was killed", exit_code=137))
    wait_for(lambda: server.steward.ended, WAIT)
    assert (server.steward.ended, server.steward.exit_code) == ("process 1 was killed", 137)


@pytest.mark.parametrize("parted", [False, True])
def test_ranks_that_are_too_few_for_too_long_learn_why_the_job_ends(parted):
    """By the type of the error. Ranks with parts of the state meet once more before."""
    with serving(min_ranks=2) as server:
        one, two = first_view(server, 2)
        two.close()
        one.report(Report(3, parted=parted))
        wait_for(lambda: server.steward.membership.below_min_ranks, WAIT)
        server.calls.append(lambda: server.steward.end_with_too_few("1 rank is left"))
        if parted:
            assert one.next_view(WAIT).last == "1 rank is left"
            late = server.join(2)
            late.report(Report())
            server.calls.append(lambda: server.steward.gone(0, "its process has ended"))
            one = late
        with pytest.raises(TooFewRanks, match="The job ends: 1 rank is left"):
            one.next_view(WAIT)


def test_a_process_that_waits_when_the_training_ends_is_told_so(server):
    (one,) = first_view(server, 1)
    two = server.join(1)
    two.report(Report())
    one.finish()
    three = server.join(2)
    three.report(Report())  # comes when all is over
    for late in (two, three):
        with pytest.raises(JobEnded) as ended:
            late.next_view(WAIT)
        assert ended.value.finished


def test_a_process_learns_whether_the_job_has_begun(server):
    early, replacement = server.join(0), server.join(5)
    early.report(Report())
    replacement.report(Report())
    assert early.next_view(WAIT).members == (0, 5)
    assert [early.first_ranks, replacement.first_ranks, server.join(6).first_ranks] == [0, 0, 2]


def test_who_waits_for_keys_is_looked_at_when_the_next_missing_one_comes():
    looks = 0

    class Counted(dict[str, str]):
        def __contains__(self, key):
            nonlocal looks
            looks += 1
            return super().__contains__(key)

    store, ranks = KeyValue(), 50
    store._values = Counted()
    keys, answers = [str(rank) for rank in range(ranks)], []
    for _ in range(ranks):
        store.request({"op": "get", "keys": ["all"]}, answers.append)
    store.request({"op": "get", "keys": keys}, answers.append)
    for key in keys:
        store.request({"op": "set", "key": key, "value": key}, lambda answer: None)
    assert answers == [{"value": keys}]
    store.request({"op": "set", "key": "all", "value": "0"}, lambda answer: None)
    assert answers[1:] == [{"value": ["0"]}] * ranks
    assert looks < 10 * ranks  # not for each that waits at each key that comes


def test_a_key_that_is_deleted_while_others_are_awaited_is_awaited_again():
    store, answers = KeyValue(), []
    store.request({"op": "set", "key": "a", "value": "1"}, lambda answer: None)
    store.request({"op": "wait", "keys": ["a", "b"]}, answers.append)
    store.request({"op": "delete", "key": "a"}, lambda answer: None)
    store.request({"op": "add", "key": "b", "value": 1}, lambda answer: None)
    assert answers == []
    expected = {"op": "compare_set", "key": "a", "expected": "", "value": "2"}
    store.request(expected, lambda answer: None)
    assert answers == [{"value": None}]
