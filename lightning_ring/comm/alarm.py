"""A timer that wakes a thread later, at no cost to the thread that sets it."""

from __future__ import annotations

import ctypes
import os


class Alarm:
    """Wakes a thread some time after it was set, without touching the interpreter's lock before;
    Linux's timerfd.

    A thread woken at once would take that lock from the caller, who in most cases is about to do
    the work itself.
    """

    def __init__(self, seconds: float) -> None:
        libc = ctypes.PyDLL(None)  # keeps the interpreter's lock: these calls do not block
        monotonic, close_on_exec = 1, 0o2000000
        self._file = libc.timerfd_create(monotonic, close_on_exec)
        if self._file < 0:
            raise OSError("timerfd_create failed")
        self._set_time = libc.timerfd_settime
        self._set_time.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        # struct itimerspec: interval, value
        self._later = (ctypes.c_long * 4)(0, 0, 0, int(seconds * 1e9))
        self._now = (ctypes.c_long * 4)(0, 0, 0, 1)

    def set(self) -> None:
        self._set_time(self._file, 0, self._later, None)

    def ring(self) -> None:
        self._set_time(self._file, 0, self._now, None)

    def wait(self) -> None:
        os.read(self._file, 8)

    def __del__(self) -> None:
        os.close(self._file)
