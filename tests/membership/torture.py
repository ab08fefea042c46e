"""Kills ranks of an elastic job at random moments: ``torture.py SEED FOLDER COMMAND...``; exit code of the job.

A rank counts as a holder of the state once its log in FOLDER has a line; one holder at least is left alive.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

from lightning_ring.launch.elastic import ElasticJob, ElasticLimits
from lightning_ring.launch.respawn import RespawnLimits

KILLS = 4
RANKS = 4


def torture(job: ElasticJob, folder: Path, draws: random.Random) -> None:
    killed = 0
    while killed < KILLS:
        time.sleep(draws.choice([0.0, 0.003, 0.03, 0.2, 0.4]))  # also during a recovery, and two at once
        pids = job.pids()
        holders = [number for number in pids if (folder / f"{number}.log").exists()]
        victim = draws.choice(list(pids) or [-1])
        if len(set(holders) - {victim}) < 1 or not holders:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[victim], signal.SIGKILL)
            killed += 1


def main() -> int:
    seed, folder, *command = sys.argv[1:]
    respawn = RespawnLimits(limit=20, delay=0.02, steady=0.0) if int(seed) % 3 else None
    limits = ElasticLimits(RANKS if respawn else RANKS + KILLS, respawn=respawn)
    job = ElasticJob([sys.executable, *command], limits)
    threading.Thread(target=torture, args=(job, Path(folder), random.Random(int(seed))), daemon=True).start()
    return job.run()


if __name__ == "__main__":
    sys.exit(main())
