"""Elastic jobs whose ranks count steps and need no torch (`tests.elastic.counting_rank`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.processes import ROOT, run

RANK = str(ROOT / "tests" / "elastic" / "counting_rank.py")
KILL = "lambda: os.kill(os.getpid(), signal.SIGKILL)"
START = (
    "import sys; from lightning_ring.launch.elastic import *; from "
    "lightning_ring.elastic.steward import *; from lightning_ring.launch import elastic; from "
    "lightning_ring.launch.hosts import Host; import os; elastic._FAIL_SECONDS = "
    "float(os.environ.get('FAIL_SECONDS', elastic._FAIL_SECONDS)); "
    "sys.exit(ElasticJob([sys.executable, *sys.argv[2:]], "
    "**eval(f'dict(limits={sys.argv[1]})')).run())"
)
AGENT = (
    ", hosts=[Host('localhost', 1), Host('elsewhere', 2)], line=lambda host, line: ['sh', '-c', "
    "line]"
)


def counting(folder: Path, text: str, steps: int = 100000) -> str:
    """A script of ``text``, in which ``count()`` takes part (`counting_rank`);
    ``when_counting(call)`` calls later.
    """
    script = folder / "script.py"
    script.write_text(
        "import os, runpy, signal, subprocess, sys, threading, time\nnumber = "
        "os.environ.get('RING_MEMBER')\ndef when_counting(call):\n    def wait():\n        while "
        f"not os.path.exists(f'{folder}/{{number}}.log'): time.sleep(0.01)\n        call()\n    "
        "threading.Thread(target=wait, daemon=True).start()\ndef count():\n    sys.argv = ['', "
        f"{str(folder)!r}, '{steps}', '0.02']\n    runpy.run_path({RANK!r}, run_name='__main__')\n"
        + text
    )
    return str(script)


def start(limits: str, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-c", START, limits, *command], **env)
