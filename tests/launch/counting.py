"""Elastic jobs whose ranks count steps and need no torch (`tests.elastic.counting_rank`)."""

import sys

from tests.processes import ROOT, START_ELASTIC, run

RANK = str(ROOT / "tests" / "elastic" / "counting_rank.py")
KILL = "lambda: os.kill(os.getpid(), signal.SIGKILL)"
JOB = [sys.executable, "-c", START_ELASTIC]
SCRIPT = """
import os, runpy, signal, subprocess, sys, threading, time
folder, number = %r, os.environ.get('RING_MEMBER')
def when_counting(call):
    def wait():
        while not os.path.exists(f'{folder}/{number}.log'): time.sleep(0.01)
        call()
    threading.Thread(target=wait, daemon=True).start()
def count():
    sys.argv = ['', folder, '%d', '0.02']
    runpy.run_path(%r, run_name='__main__')
"""


def counting(folder, text, steps=100000):
    """A script of ``text``, in which ``count()`` takes part (`counting_rank`);
    ``when_counting(call)`` calls later. ``folder`` and ``number`` are known.
    """
    script = folder / "script.py"
    script.write_text(SCRIPT % (str(folder), steps, RANK) + text)
    return str(script)


def start(limits, *command, **env):
    return run([*JOB, limits, sys.executable, *command], **env)
