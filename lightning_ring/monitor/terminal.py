"""Progress bars under mpirun."""

from __future__ import annotations

import os
import shutil
import struct
import sys


def widen_terminal() -> None:
    """Give a terminal of 0 columns the width in ``COLUMNS``, or 80.

    mpirun connects each rank's output to such a pseudo-terminal, and tqdm draws nothing where nothing fits. Does
    nothing where output is no terminal, or has a width.
    """
    if os.name != "posix" or not sys.stdout.isatty():
        return
    import fcntl  # POSIX only
    import termios

    descriptor = sys.stdout.fileno()
    if os.get_terminal_size(descriptor).columns == 0:
        columns, lines = shutil.get_terminal_size()
        fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
