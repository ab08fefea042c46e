"""Processes that are forked for a job of `chaos.py`, and what the kernel tells of them."""

import ctypes
import os
import signal
from pathlib import Path


class Forked:
    """What `Child` asks of its `subprocess.Popen`. The exit code also goes into a file."""

    def __init__(self, pid, log):
        self.pid = pid
        self._log = log
        self.returncode = None

    def poll(self):
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
                self._log.write_text(str(self.returncode))
        return self.returncode


def die_with_parent():
    """Let the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG


def field_of(pid, number):
    """Of what the kernel tells of a process: 0 is its state, 1 its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[number]
    except OSError:
        return "gone"


def children_of(parent):
    """Pids of the processes whose parent is ``parent``, also of ended ones that it has not waited
    for.
    """
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if field_of(pid, 1) == str(parent)]
