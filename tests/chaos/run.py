"""One job with planted faults, and what became of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos import host as chaos_host
from tests.chaos.checks import Outcome
from tests.chaos.job import SLOW_SECONDS, Job
from tests.chaos.plan import Plan
from tests.chaos.rank import fit
from tests.hosts import open_hosts

_DISK_MIB = 4
_SHM_MIB = 16


@dataclass(slots=True)
class Result:
    """What became of a job. ``faults`` were carried out; ``wrong`` says what is wrong, in words."""

    plan: Plan
    faults: list[list[str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    joined: int = 0
    finished: bool = False
    lost: bool = False
    returns: int = 0
    seconds: float = 0.0
    standstill: float = 0.0


def run_job(plan, *, mounts):
    """``mounts``: whether this process may make some, for small disks."""
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    with contextlib.ExitStack() as surroundings:
        surroundings.callback(shutil.rmtree, folder, ignore_errors=True)
        surroundings.callback(chaos_host.remove_groups)
        (folder / "disk").mkdir()
        if mounts:
            surroundings.enter_context(chaos_host.small_disk(folder / "disk", _DISK_MIB))
            surroundings.enter_context(chaos_host.small_disk(Path("/dev/shm"), _SHM_MIB))
        before = set(os.listdir("/dev/shm"))
        hosts = (
            surroundings.enter_context(open_hosts(plan.hosts, rate=None)) if plan.hosts else None
        )
        job = Job(plan, folder, lambda number: fit(folder, number, plan), hosts)
        job.run()
        outcome = Outcome(job)
        result = Result(
            plan, outcome.faults, outcome.wrong, outcome.joined, outcome.finished, outcome.lost
        )
        result.returns, result.standstill = outcome.returns, job.standstill
        new = set(os.listdir("/dev/shm")) - {*before, chaos_host.FILLER}
        if "shm" in (kind for *_, kind in outcome.faults):
            # torch's, of a loader that found it full
            new = {name for name in new if not name.startswith("torch_")}
        # a loader's semaphores have names for the time of a call, in which it may be killed
        new = {name for name in new if not name.startswith("sem.")}
        if new := {name for name in new if mounts or name.startswith("lightning")}:
            result.wrong.append(f"left in /dev/shm: {sorted(new)}")
        if result.wrong or result.standstill > SLOW_SECONDS:
            kept = (
                Path(tempfile.gettempdir())
                / f"chaos-{'failed' if result.wrong else 'slow'}-{plan.seed}"
            )
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(
                folder, kept, ignore=shutil.ignore_patterns("ssh", "tmp", chaos_host.FILLER)
            )
    result.seconds = time.monotonic() - began
    return result
