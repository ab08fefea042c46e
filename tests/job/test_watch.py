"""The job watch between threads that stand for ranks; real processes are in test_jobs.py."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from lightning_ring.errors import PeerFailedError
from lightning_ring.job.ranks import RankInfo
from lightning_ring.job.rendezvous.door import knock
from lightning_ring.job.watch import watch as watch_module
from lightning_ring.job.watch.watch import JobWatch
from tests.processes import wait_for


@contextlib.contextmanager
def job(world_size):
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def build(rank):
        store = server
        if rank:
            store = TCPStore("127.0.0.1", server.port, wait_for_workers=False)
        info = RankInfo(rank, world_size, rank, world_size, 0, 1, "torchrun")
        return JobWatch(info, store, "secret")

    with ThreadPoolExecutor(world_size) as pool:
        watches = list(pool.map(build, range(world_size)))
    try:
        yield watches
    finally:
        for watch in reversed(watches):
            watch.close()


def vanish(watch):
    """What the kernel does for a process that is killed."""
    watch._connection.socket.shutdown(socket.SHUT_RDWR)


def assert_fails(watch, match):
    wait_for(watch.failure)
    with pytest.raises(PeerFailedError, match=match):
        watch.check()


@pytest.fixture
def ended(monkeypatch):
    """Lines of ranks that the watch ended, instead of ending pytest."""
    lines = []
    monkeypatch.setattr(watch_module, "say", lines.append)
    monkeypatch.setattr(watch_module, "end_process", lambda code: lines.append(f"exit {code}"))
    return lines


def test_a_failure_is_raised_on_all_other_ranks_and_named():
    with job(3) as watches:
        for watch in watches:
            watch.check()
        watches[1].report(ValueError("no such photo"))
        for rank in (0, 2):
            told = r"rank 1 \(host .*, pid \d+\) failed: ValueError: no such photo"
            assert_fails(watches[rank], told)
        watches[1].check()  # its own failure is no peer's


def test_the_first_error_is_blamed_not_its_echoes():
    with job(3) as watches:
        watches[2].report(PeerFailedError("rank 1 failed"))  # its news overtook rank 1's own
        watches[1].report(ValueError("the first"))
        wait_for(lambda: (event := watches[0].failure()) and event.rank == 1)
        assert_fails(watches[0], "the first")


def test_rank_0_vanishing_is_seen_without_its_relay():
    with job(3) as watches:
        relay = watches[0]._relay
        wait_for(lambda: len(relay.hellos()) == 3)
        relay.door.close()
        for rank in (1, 2):
            assert_fails(watches[rank], r"rank 0 .* died")


def test_a_rank_that_left_counts_only_after_a_while(monkeypatch):
    monkeypatch.setattr(watch_module, "LEFT_GRACE", 0.5)
    with job(2) as watches:
        watches[1].leave()
        wait_for(lambda: watches[0]._left)
        watches[0].check()  # what it sent before may be on the way
        time.sleep(0.6)
        with pytest.raises(PeerFailedError, match=r"rank 1 .* has left the job"):
            watches[0].check()
        assert watches[0].failure() is None  # leaving is no failure: nobody is ended for it


def test_a_new_fit_starts_clean(ended, monkeypatch):
    with job(2) as watches:
        for watch in watches:
            watch.report(ValueError("in the first fit"))
        wait_for(lambda: all(watch.failure() for watch in watches))
        monkeypatch.setattr(watch_module, "FAILED_GRACE", 0.0)
        time.sleep(1)  # the watches look more than once
        assert ended == []  # both have failed, and their users caught it
        watches[0].reset()
        watches[0].report(KeyError("in the second"))  # rank 1 has not come so far yet
        wait_for(lambda: len(watches[1]._failures) == 2)
        assert watches[0].failure() is None
        watches[1].reset()
        assert_fails(watches[1], "in the second")


def test_a_rank_that_dies_in_a_later_fit_is_dead():
    with job(3) as watches:
        watches[1].report(ValueError("caught"))
        for watch in watches:
            watch.reset()
        watches[0].check()
        vanish(watches[1])
        for rank in (0, 2):
            assert_fails(watches[rank], r"rank 1 .* died: its process ended without a word")


def test_a_rank_that_goes_on_is_ended_after_the_grace(ended, monkeypatch):
    monkeypatch.setattr(watch_module, "FAILED_GRACE", 0.3)
    with job(2) as watches:
        watches[1].report(ValueError("boom"))
        wait_for(lambda: len(ended) > 1)
        assert "rank 0 ends, 0 s after it was told: rank 1" in ended[0]
        assert "ValueError: boom" in ended[0]
        assert ended[1] == "exit 1"


def test_an_error_of_the_transport_is_explained():
    with job(2) as watches:
        threading.Timer(0.3, lambda: watches[1].report(ValueError("the cause"))).start()
        error = RuntimeError("Connection closed by peer")
        with pytest.raises(PeerFailedError, match="the cause") as raised:
            watches[0].blame(error, seconds=60)
        assert raised.value.__cause__ is error
    with job(2) as watches:
        watches[0].blame(error, seconds=0.1)  # nobody failed: the caller raises its own


def heard_by(watches):
    """The messages that each is going to hear."""
    heard = [[] for _ in watches]
    for watch, messages in zip(watches, heard, strict=True):
        watch.on_event(messages.append)
    return heard


def test_messages_reach_all_ranks_in_one_order():
    with job(3) as watches:
        heard = heard_by(watches)
        # one that connects later gets the failures only
        wait_for(lambda: len(watches[0].peers()) == 3)
        with ThreadPoolExecutor(3) as pool:
            list(
                pool.map(
                    lambda watch: [watch.tell({"kind": "place", "place": n}) for n in range(50)],
                    watches,
                )
            )
        wait_for(lambda: all(len(messages) == 150 for messages in heard))
        orders = [[(message["rank"], message.get("place")) for message in told] for told in heard]
        assert orders[0] == orders[1] == orders[2]


def test_a_message_to_one_rank_reaches_that_one_and_its_sender_is_told():
    with job(4) as watches:
        heard = heard_by(watches)
        assert watches[2].tell({"kind": "place", "place": 1, "to": 1}, wait=60)
        assert watches[2].tell({"kind": "place", "place": 2}, wait=60)
        wait_for(lambda: all(told and told[-1].get("place") == 2 for told in heard))
        places = [[message.get("place") for message in told] for told in heard]
        assert places == [[2], [1, 2], [None, 2], [2]]
        assert watches[0].peers().keys() == {0, 1, 2, 3}
        watches[3].leave()
        wait_for(lambda: watches[0].peers().keys() == {0, 1, 2})


def test_a_second_hello_for_a_rank_is_refused():
    with job(2) as watches:
        relay, hello = watches[0]._relay, {"rank": 1, "host": "elsewhere", "pid": 1}
        with pytest.raises(PermissionError, match=r"rank 1 is process \d+ on"):
            knock(["127.0.0.1"], relay.door.port, "secret", "watch", hello, 60)
        watches[0].check()
        assert watches[1].tell({"kind": "still here"}, wait=60)


def test_rank_0_stays_until_the_others_have_left():
    with job(2) as watches, ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(watches[0].leave)
        time.sleep(0.3)
        assert not leaving.done()
        watches[1].leave()
        leaving.result(timeout=60)


def test_close_ends_the_thread():
    with job(2) as watches:
        watches[1].close()
        assert not watches[1]._thread.is_alive()
        assert watches[1].failure() is None  # its own end is no death of rank 0


def test_the_watch_blames_the_first_of_the_fit():
    home = {"host": "node0", "pid": 7, "fit": 1}
    with job(2) as (watch, _):
        watch.reset()
        watch._note({"kind": "failed", "rank": 3, "text": "old"} | home | {"fit": 0})
        assert watch.failure() is None
        watch._note({"kind": "failed", "rank": 1, "text": "echo", "echo": True} | home)
        watch._note({"kind": "dead", "rank": 2, "text": "Connection timed out"} | home)
        told = "rank 2 (host node0, pid 7) was lost: Connection timed out"
        assert told in str(watch.failure())


def test_echoes_and_departures_of_many_ranks_are_not_told_to_each_of_them(monkeypatch):
    with job(8) as watches:
        heard = heard_by(watches)
        vanish(watches[7])
        wait_for(lambda: all(watch.failure() for watch in watches[:7]))
        for watch in watches[:7]:
            watch.report(PeerFailedError("rank 7 died"))
        assert watches[0].failure().rank == watches[6].failure().rank == 7
        for watch in reversed(watches[:7]):  # rank 0 waits for the others
            watch.leave_early()
    kinds_by_rank = [[message["kind"] for message in told] for told in heard]
    assert kinds_by_rank[0].count("failed") == kinds_by_rank[0].count("left") == 7
    for kinds in kinds_by_rank[1:7]:
        # two are told to all, and each hears its own; a rank that has left hears no more
        assert kinds.count("dead") == 1
        assert kinds.count("failed") <= 3
        assert kinds.count("left") <= 3


def test_failures_of_a_new_fit_are_told_again_and_those_of_earlier_ones_forgotten():
    with job(4) as watches:
        for fit in range(3):
            for watch in watches[1:]:
                watch.report(ValueError(f"in fit {fit}"))
            wait_for(lambda: all(watch.failure() for watch in watches))
            for watch in watches:
                watch.reset()
                assert watch.failure() is None
        relay = watches[0]._relay
        assert [message["fit"] for message in relay._history] == [2, 2]
