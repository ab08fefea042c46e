"""What an elastic process drops is not destroyed in a process that is forked from it."""

from __future__ import annotations

import gc
import os

from lightning_ring.elastic.generations import leave_garbage_to_parent


class Group:
    """In a cycle, as torch's groups are once they are closed; its end in a forked process shows as an exit code."""

    def __init__(self) -> None:
        self.itself, self.owner = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            os._exit(3)


def test_a_garbage_collection_in_a_forked_process_leaves_groups_of_earlier_generations_alone() -> None:
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
