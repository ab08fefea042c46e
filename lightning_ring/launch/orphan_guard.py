"""A small process that ends the ranks when the one that started them is killed, and says so in one
line.

Ranks that the kernel ends with their parent (`child`) leave behind what they have started, and a
wrapper leaves its rank. The guard is told the sessions through a pipe, which the kernel closes,
however its writer dies. It is run by its path, without the package, so that it takes a few
milliseconds and MiB.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path


class OrphanGuard:
    """The guard of this process's children. `watch` each of them, and `close` it at the end."""

    def __init__(self, line: str) -> None:
        import subprocess  # not in the guard itself

        command = [sys.executable, "-I", "-S", __file__, line]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, start_new_session=True, cwd="/"
        )

    def watch(self, leader: int) -> None:
        """The session of ``leader`` ends with this process."""
        self._tell(f"{leader}\n")

    def forget(self, leader: int) -> None:
        """The session is over. Its number may be another's from now on."""
        self._tell(f"-{leader}\n")

    def close(self) -> None:
        """End the guard; the sessions go on."""
        self._tell("end\n")
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # somebody killed the guard
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def main(line: str) -> None:
    # beside this file: the package is not imported
    sys.path.insert(0, str(Path(__file__).parent))
    from processes import processes_of_sessions

    leaders: set[int] = set()
    for word in sys.stdin:
        if word == "end\n":
            return
        number = int(word)
        leaders.add(number) if number > 0 else leaders.discard(-number)
    print(f"lightning_ring: {line}", file=sys.stderr, flush=True)
    until = time.monotonic() + 5.0
    while (pids := processes_of_sessions(leaders)) and time.monotonic() < until:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


if __name__ == "__main__":
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    main(sys.argv[1])
