"""One job with planted faults, and what became of it."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from tests.chaos import host as chaos_host
from tests.chaos.checks import Outcome
from tests.chaos.job import SLOW_SECONDS, Job
from tests.chaos.rank import fit
from tests.hosts import open_hosts

_DISK_MIB = 4
_SHM_MIB = 16


def run_job(plan, *, mounts):
    """``mounts``: whether this process may make some, for small disks."""
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
        result = Outcome(job)
        # a loader's semaphores have names for the time of a call, in which it may be killed
        others = ("sem.", chaos_host.FILLER)
        if "shm" in (kind for *_, kind in result.faults):
            others += ("torch_",)  # of a loader that found it full
        left = [name for name in {*os.listdir("/dev/shm")} - before if not name.startswith(others)]
        if new := [name for name in left if mounts or name.startswith("lightning")]:
            result.wrong.append(f"left in /dev/shm: {sorted(new)}")
        if result.wrong or result.standstill > SLOW_SECONDS:
            how = "failed" if result.wrong else "slow"
            kept = Path(tempfile.gettempdir(), f"chaos-{how}-{plan.seed}")
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(
                folder, kept, ignore=shutil.ignore_patterns("ssh", "tmp", chaos_host.FILLER)
            )
    return result
