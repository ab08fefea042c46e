"""Plain ``python launched_script.py FOLDER``: the launcher makes two ranks of it."""

import os
import sys
from pathlib import Path

from lightning_ring.integrations.ranks.environment import RingEnvironment
from lightning_ring.integrations.ranks.launcher import RingLauncher

folder = Path(sys.argv[1])
environment = RingEnvironment()


def train():
    (folder / f"rank.{environment.global_rank()}").write_text(
        f"{environment.world_size()} {environment.discover().source}"
    )
    return "trained"


launcher = RingLauncher(environment, num_processes=2, num_nodes=1, use_mpi=True)
result = launcher.launch(train)
(folder / f"after.{os.getpid()}").write_text(result)
sys.exit(7 if environment.global_rank() == 1 else 0)
