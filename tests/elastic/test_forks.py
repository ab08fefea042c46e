"""What an elastic process drops is not destroyed in a process that is forked from it."""

import gc
import os
import sys

import pytest

from lightning_ring.elastic.generations import leave_garbage_to_parent
from tests.processes import run


class Group:
    """In a cycle, as torch's groups are once they are closed; its end in a forked process shows
    as an exit code.
    """

    def __init__(self):
        self.itself, self.owner = self, os.getpid()

    def __del__(self):
        if os.getpid() != self.owner:
            os._exit(3)


def test_a_garbage_collection_in_a_forked_process_leaves_groups_of_earlier_generations_alone():
    leave_garbage_to_parent()
    gc.disable()
    try:
        Group()
        pid = os.fork()
        if pid == 0:
            gc.collect()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        gc.enable()


FORKED = """
import gc, os
from lightning_ring.elastic.generations import leave_garbage_to_parent
from tests.elastic.test_forks import Group

kept = []
os.register_at_fork(after_in_child=lambda: kept.extend([] for _ in range(100_000)))
leave_garbage_to_parent()
gc.collect()
Group()
if (pid := os.fork()) == 0:
    os._exit(0 if gc.isenabled() else 4)
assert gc.isenabled()
print("exit code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.ranks
def test_so_does_one_that_begins_before_the_process_is_told():
    done = run([sys.executable, "-c", FORKED])
    assert done.stdout.strip().endswith("exit code 0"), done.stdout
