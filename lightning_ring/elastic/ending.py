"""An error of one rank's program ends the job; the end of the job ends each rank with one line."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from lightning_ring.elastic.member import Member
from lightning_ring.elastic.membership import GenerationOver, JobEnded
from lightning_ring.job.exit import end_process, in_one_line, leave_cause, say


def end_job_on_error(member: Member) -> Callable[[], None]:
    """Let an uncaught exception in this process end the whole job. Returns a function that undoes
    it.

    A rank that only learns that the job has ended prints one line.
    """
    previous, pid = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        if os.getpid() != pid:  # a forked child
            return previous(kind, error, trace)
        if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
            # torch.distributed wraps this hook, and collects its output
            sys.stderr = sys.__stderr__
        if isinstance(error, JobEnded):
            if not error.finished:
                say(f"process {member.number} ends: {error}")
            end_process(error.exit_code)
        previous(kind, error, trace)
        summary = f"process {member.number} (pid {pid}) failed: {in_one_line(error)}"
        if type(error) is GenerationOver:  # not Horovod's, which a script may catch
            summary += (
                " The job cannot go on after the death of a rank outside of a fit. Start it again."
            )
        leave_cause(summary)
        member.fail(summary)
        end_process(130 if isinstance(error, KeyboardInterrupt) else 1)

    def take_back() -> None:
        if sys.excepthook is hook:
            sys.excepthook = previous

    sys.excepthook = hook
    return take_back
