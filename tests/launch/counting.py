"""Elastic jobs whose ranks count steps and need no torch (`tests.elastic.counting_rank`)."""

import sys

from tests.processes import ROOT, run

RANK = str(ROOT / "tests" / "elastic" / "counting_rank.py")
KILL = "lambda: os.kill(os.getpid(), signal.SIGKILL)"
START = """
import os, sys
from lightning_ring.elastic.steward import *
from lightning_ring.launch import elastic
from lightning_ring.launch.elastic import *
from lightning_ring.launch.hosts import Host
elastic._FAIL_SECONDS = float(os.environ.get('FAIL_SECONDS', elastic._FAIL_SECONDS))
arguments = eval(f'dict(limits={sys.argv[1]})')
sys.exit(ElasticJob([sys.executable, *sys.argv[2:]], **arguments).run())
"""
# an agent on this very host, which has a second name
AGENT = """, hosts=[Host('localhost', 1), Host('elsewhere', 2)],
    line=lambda host, line: ['sh', '-c', line]"""
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
    return run([sys.executable, "-c", START, limits, *command], **env)
