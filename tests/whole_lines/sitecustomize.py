"""Python imports this at its start where `tests.processes.clean_env` put its folder on PYTHONPATH.

Several ranks print into one pipe. Unbuffered, `print` writes a line in pieces, between which
another rank's may come: here each line is one write.
"""

import sys

for stream in (sys.stdout, sys.stderr):
    if stream is not None:  # closed by who started it
        stream.reconfigure(line_buffering=True, write_through=False)
