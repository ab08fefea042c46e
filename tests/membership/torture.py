"""Kills ranks of an elastic job at random moments: ``torture.py [options] SEED FOLDER COMMAND...``.

A rank counts as a holder of the state once its log in FOLDER has a line; one holder at least is
left alive.
"""

from __future__ import annotations

import argparse
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


def torture(job: ElasticJob, folder: Path, draws: random.Random, kills: int) -> None:
    killed: set[int] = set()  # which the job may have yet to notice
    # which a rank writes after its training
    while len(killed) < kills and not list(folder.glob("*.json")):
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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument(
        "--no-respawn", action="store_true", help="else only every third seed is without"
    )
    parser.add_argument("seed", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    replaced = not options.no_respawn and options.seed % 3 > 0
    respawn = RespawnLimits(limit=20, delay=0.02, steady=0.0) if replaced else None
    ranks = options.ranks if replaced or options.no_respawn else options.ranks + options.kills
    job = ElasticJob([sys.executable, *options.command], ElasticLimits(ranks, respawn=respawn))
    draws = random.Random(options.seed)
    threading.Thread(
        target=torture, args=(job, options.folder, draws, options.kills), daemon=True
    ).start()
    return job.run()


if __name__ == "__main__":
    sys.exit(main())
