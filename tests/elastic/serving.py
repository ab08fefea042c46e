"""A steward in a thread, and members in the same process."""

import threading
from contextlib import contextmanager

from lightning_ring.elastic.member import Member
from lightning_ring.elastic.membership import Membership, Report
from lightning_ring.elastic.steward import Steward

WAIT = 60.0


class Serving:
    """A steward in a thread, whose members are threads' too: a killed one is seen to be dead at
    once.
    """

    def __init__(self, **limits):
        self.calls = []  # of the steward, in its thread
        self.killed = []

        self.members = []
        self.steward = Steward(Membership(**limits), self.kill, idle=lambda member: 1e9)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self):
        while not self.over.is_set():
            self.steward.step(0.005)
            while self.calls:
                self.calls.pop(0)()
            while self.killed:
                self.steward.gone(self.killed.pop(), "killed")

    def kill(self, number, why, seconds):

        self.killed.append(number)

    def join(self, number):
        if not self.steward.membership.knows(number):
            self.steward.expect(number)
        member = Member(self.steward.variables(number))
        member.on_lost = lambda: None
        member.open()
        self.members.append(member)
        return member


@contextmanager
def serving(**limits):
    server = Serving(**limits)
    try:
        yield server
    finally:
        for member in server.members:
            member.close()
        server.over.set()
        server.thread.join(WAIT)
        server.steward.close()


def first_view(server, count):
    for number in range(count):
        server.steward.expect(number)
    members = [server.join(number) for number in range(count)]
    for member in members:
        member.report(Report())
    for member in members:
        assert member.next_view(WAIT).members == tuple(range(count))
    return members
