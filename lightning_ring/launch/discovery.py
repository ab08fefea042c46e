"""A command that lists the hosts of a job, for clusters that grow and shrink."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO

from lightning_ring.errors import ConfigurationError
from lightning_ring.job.exit import say
from lightning_ring.launch.hosts import Host, listed_hosts

EVERY_SECONDS = 1.0
LONGEST_SECONDS = 60.0  # of one run
_LOOK_SECONDS = 0.05


@dataclass(eq=False)
class Discovery:
    """Runs ``command`` again and again: it writes a host a line, ``host`` or ``host:slots``. None
    is called twice at the same time. ``slots``: of a host whose line does not say.
    """

    command: Sequence[str]
    slots: int = 1
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _output: IO[bytes] | None = field(default=None, init=False)
    _began: float = field(default=0.0, init=False)
    _next: float = field(default=0.0, init=False)
    _complaint: str = field(default="", init=False)  # the last one: each is said once

    def wait_for(self, ranks: int, seconds: float) -> list[Host]:
        """The hosts, once they have ``ranks`` slots together. Blocks.

        Raises:
            ConfigurationError: The first run fails, or there are fewer slots after ``seconds``.
        """
        until, told = time.monotonic() + seconds, False
        try:
            while True:
                hosts = self.look(time.monotonic(), must_work=not told)
                if hosts is not None:
                    slots = sum(host.slots for host in hosts)
                    if slots >= ranks:
                        return hosts
                    if not told:
                        say(
                            f"{slots} slots on {len(hosts)} hosts, waiting up to {seconds:g} s "
                            f"for {ranks}"
                        )
                    told = True
                if time.monotonic() > until:
                    raise ConfigurationError(
                        f"`{shlex.join(self.command)}` has not listed {ranks} slots within "
                        f"{seconds:g} s. Ask for fewer ranks with -n, or wait longer with "
                        "--wait-for-ranks."
                    )
                time.sleep(_LOOK_SECONDS)
        except BaseException:  # Ctrl-C too
            self.close()
            raise

    def look(self, now: float, must_work: bool = False) -> list[Host] | None:
        """What a run that has just ended has listed; `None` otherwise, and where it failed, which
        is said.

        Called again and again; never blocks.

        Raises:
            ConfigurationError: A run failed that ``must_work``.
        """
        if self._process is None:
            if now >= self._next:
                self._start(now, must_work)
            return None
        code = self._process.poll()
        if code is None:
            if now - self._began > LONGEST_SECONDS:
                self._kill()
                self._complain(f"was ended after {LONGEST_SECONDS:.0f} s", must_work)
            return None
        assert self._output is not None
        self._output.seek(0)
        text = self._output.read().decode(errors="replace")
        self._end(now)
        if code != 0:
            self._complain(f"ended with exit code {code}", must_work)
            return None
        try:
            hosts = listed_hosts(text.splitlines(), self.slots, f"`{shlex.join(self.command)}`")
        except ConfigurationError as error:
            if must_work:
                raise
            self._complain(str(error), must_work)
            return None
        self._complaint = ""
        return hosts

    def close(self) -> None:
        if self._process is not None:
            self._kill()

    def _start(self, now: float, must_work: bool) -> None:
        self._began = now
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by _end)
        try:
            self._process = subprocess.Popen(
                list(self.command),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                start_new_session=True,
            )
        except OSError as error:
            self._end(now)
            self._complain(f"could not be run: {error.strerror}", must_work)

    def _kill(self) -> None:
        assert self._process is not None
        # not waited for yet: the number is still its own
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._end(time.monotonic())

    def _end(self, now: float) -> None:
        if self._output is not None:
            self._output.close()
        self._process = self._output = None
        self._next = now + EVERY_SECONDS

    def _complain(self, what: str, must_work: bool) -> None:
        text = f"the command that lists the hosts, `{shlex.join(self.command)}`, {what}"
        if must_work:
            raise ConfigurationError(
                f"{text}. It writes one host a line, such as gpu01:4, and ends with 0."
            )
        if text != self._complaint:
            self._complaint = text
            say(f"{text}; the hosts of before count")
