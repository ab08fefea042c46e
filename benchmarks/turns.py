"""Jobs that train at the same time of day but never at the same time: they take turns, some steps
each.

Ratios of two jobs are only as good as what both share. Run one after the other, minutes apart, they
meet different machines (clock rates, neighbours); in one process, each other's threads and memory.
Here every job has processes of its own, all are up from the start, and whoever does not have the
turn blocks in a read and takes no processor time. Ranks talk to the conductor over a Unix socket,
which reaches into network namespaces too.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 240.0  # for all jobs' imports and first collectives
TURN_SECONDS = 60.0


def prepare():
    """For the ranks of all jobs: one thread each, and this checkout on their path. SIGTERM leaves
    no job behind.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def parser_of(text):
    """Of a command whose help begins with ``text``."""
    whole = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=text, formatter_class=whole)


class Processes:
    """Commands that run until they end or this context manager does; it leaves none behind.

    Their output goes to files in ``folder``. They share a session: Linux shares the cores out by
    session first, then by process.
    """

    def __init__(self, folder):
        self.folder = folder
        self.running = []

    def start(self, command, **environ):
        with (self.folder / f"{len(self.running)}.log").open("wb") as log:
            files = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            environ = os.environ | environ
            process = subprocess.Popen(command, env=environ, preexec_fn=os.setpgrp, **files)
        self.running.append(process)
        return process

    def outputs(self):
        """The last lines that each command and its processes have written."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(log.read_text(errors="replace")[-3000:] for log in logs)

    def wait(self, seconds):
        until = time.monotonic() + seconds
        for process in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            self.wait(10.0)


class Conductor(Processes):
    """Lets jobs that it starts train in turns. Its socket lies in ``folder`` too."""

    def __init__(self, folder):
        super().__init__(folder)
        self._ranks = {}
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(str(folder / "turns"))
        self._door.listen(64)

    def __exit__(self, *error):
        self._door.close()
        super().__exit__(*error)

    def open(self, commands, jobs, num_ranks):
        """Run ``commands``, and wait until all ``num_ranks`` ranks of each of ``jobs`` are about
        to train.
        """
        for command in commands:
            self.start(command, TURNS_SOCKET=str(self.folder / "turns"))
        self._ranks = {name: [] for name in jobs}
        until = time.monotonic() + START_SECONDS
        while any(len(ranks) < num_ranks for ranks in self._ranks.values()):
            self._accept(until)

    def _accept(self, until):
        self._door.settimeout(0.2)
        try:
            connection, _ = self._door.accept()
        except TimeoutError:
            self._check_alive()
            if time.monotonic() > until:
                waiting = {name: len(ranks) for name, ranks in self._ranks.items()}
                raise SystemExit(f"not all ranks train in time; by job: {waiting}") from None
            return
        connection.settimeout(TURN_SECONDS)
        stream = connection.makefile("rw")
        self._ranks[json.loads(stream.readline())].append(stream)

    def _check_alive(self):
        for process in self.running:
            if code := process.poll():
                raise SystemExit(f"a job ended with exit code {code}:\n{self.outputs()}")

    def turn(self, job, num_steps):
        """Seconds of each of ``num_steps`` steps of ``job`` in the mean of its ranks, after one
        that is not timed.

        Ranks wait for each other. In the slowest rank's time of every step a delay would count
        twice: its rank is late, and then the other that waited for it.
        """
        return [sum(step) / len(step) for step in zip(*self._ask(job, num_steps + 1), strict=True)]

    def finish(self):
        """Let every job end; returns what its ranks say of themselves (`Turns.facts`)."""
        facts = {job: self._ask(job, 0) for job in self._ranks}
        self.wait(TURN_SECONDS)
        self._check_alive()
        return facts

    def _ask(self, job, num_steps):
        answers = []
        for stream in self._ranks[job]:
            with contextlib.suppress(OSError):  # a rank that has left answers nothing
                stream.write(f"{num_steps}\n")
                stream.flush()
        for stream in self._ranks[job]:
            line = ""
            with contextlib.suppress(OSError):  # it has left, or took longer than a turn may
                line = stream.readline()
            if not line:
                time.sleep(1.0)  # its launcher says why
                self._check_alive()
                # Its launcher waits for the others.
                raise SystemExit(f"{job}: a rank left in mid-turn, or hangs:\n{self.outputs()}")
            answers.append(json.loads(line))
        return answers


class Turns:
    """A rank's side: call `wait` at the beginning of every step.

    Args:
        job: Its name.
        synchronize: On a GPU, what waits for it. Only the whole turn is timed then, so that steps
            queue up as in training.
        pause: Called when a turn is over, to give back memory that the others need.
    """

    def __init__(self, job, synchronize=None, pause=lambda: None):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(os.environ["TURNS_SOCKET"])
        self._stream = connection.makefile("rw")
        self._say(job)
        self._synchronize = synchronize
        self._pause = pause
        self._left = 0
        # at the beginning of each step of this turn, and at the end of the last
        self._clock = []

    def wait(self):
        """Return when this step may begin; False for the last one, which is not timed."""
        if self._left == 0:
            if self._clock:
                self._tick(synchronize=True)
                self._pause()
                self._say(self._seconds())
            self._left = int(self._stream.readline())
            if self._left == 0:
                return False
            self._clock.clear()
        self._tick(synchronize=len(self._clock) == 1)
        self._left -= 1
        return True

    def leave(self, facts):
        """After training: tell the conductor what it cannot see."""
        self._say(facts)
        self._stream.close()

    def _tick(self, synchronize):
        if synchronize and self._synchronize is not None:
            self._synchronize()
        self._clock.append(time.perf_counter())

    def _seconds(self):
        """Of each step but the first, which finds caches cold, and of a sharded optimizer its
        parameters gathered.
        """
        clock = self._clock[1:]
        if self._synchronize is not None:
            return [(clock[-1] - clock[0]) / (len(clock) - 1)] * (len(clock) - 1)
        return [after - before for before, after in pairwise(clock)]

    def _say(self, message):
        self._stream.write(json.dumps(message) + "\n")
        self._stream.flush()
