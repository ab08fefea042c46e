"""Kills ranks of an elastic job at random moments: ``torture.py SEED FOLDER COMMAND...``.

A rank counts as a holder of the state once its log in FOLDER has a line; one holder at least is
left alive.
"""

import contextlib
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

from lightning_ring.launch.elastic import ElasticJob, ElasticLimits
from lightning_ring.launch.process_ends import RespawnLimits

KILLS = 4


def torture(job, folder, draws):
    killed = set()  # which the job may have yet to notice
    # which a rank writes after its training
    while len(killed) < KILLS and not list(folder.glob("*.json")):
        # also during a recovery, and two at once
        time.sleep(draws.choice([0.0, 0.003, 0.03, 0.2, 0.4]))
        pids = {number: pid for number, pid in job.pids().items() if number not in killed}
        holders = [number for number in pids if (folder / f"{number}.log").exists()]
        victim = draws.choice(list(pids) or [-1])
        if len(set(holders) - {victim}) < 1 or not holders:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[victim], signal.SIGKILL)
            killed.add(victim)


def main():
    seed, folder, *command = sys.argv[1:]
    replaced = int(seed) % 3 > 0
    respawn = RespawnLimits(limit=20, delay=0.02, steady=0.0) if replaced else None
    ranks = 4 if replaced else 4 + KILLS
    job = ElasticJob([sys.executable, *command], ElasticLimits(ranks, respawn=respawn))
    arguments = job, Path(folder), random.Random(int(seed))
    threading.Thread(target=torture, args=arguments, daemon=True).start()
    return job.run()


if __name__ == "__main__":
    sys.exit(main())
