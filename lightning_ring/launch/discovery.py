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
    """Runs ``command`` again and again, one at a time: it writes a host a line, ``host`` or
    ``host:slots``. ``slots`` is the default.
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
        until, look = time.monotonic() + seconds, self._look
        try:
            while True:
                hosts = look(time.monotonic())
                if hosts is not None:
                    slots = sum(host.slots for host in hosts)
                    if slots >= ranks:
                        return hosts
                    if look == self._look:
                        say(
                            f"{slots} slots on {len(hosts)} hosts, waiting up to {seconds:g} s "
                            f"for {ranks}"
                        )
                    look = self.look
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

    def look(self, now: float) -> list[Host] | None:
        """The hosts that a finished run listed; `None` if none has, or it failed. Never blocks."""
        try:
            hosts = self._look(now)
        except ConfigurationError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                say(f"{error} The hosts of before count.")
            return None
        if hosts is not None:
            self._complaint = ""
        return hosts

    def _look(self, now: float) -> list[Host] | None:
        if self._process is None:
            if now >= self._next:
                self._start(now)
            return None
        code = self._process.poll()
        if code is None:
            if now - self._began <= LONGEST_SECONDS:
                return None
            self.close()
            raise self._failed(f"was ended after {LONGEST_SECONDS:.0f} s")
        assert self._output is not None
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()
        self._end(now)
        if code:
            raise self._failed(f"ended with exit code {code}")
        return listed_hosts(lines, self.slots, f"`{shlex.join(self.command)}`")

    def close(self) -> None:
        if self._process is not None:
            # Not waited for yet, so that the number is not reused.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._end(time.monotonic())

    def _start(self, now: float) -> None:
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
            raise self._failed(f"could not be run: {error.strerror}") from error

    def _end(self, now: float) -> None:
        if self._output is not None:
            self._output.close()
        self._process = self._output = None
        self._next = now + EVERY_SECONDS

    def _failed(self, how: str) -> ConfigurationError:
        return ConfigurationError(
            f"the command that lists the hosts, `{shlex.join(self.command)}`, {how}. It writes one "
            "host a line, such as gpu01:4, and ends with 0."
        )
