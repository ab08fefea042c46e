"""Prints, as one line, what a process takes itself for. ``place_script.py NAME``"""

import sys

from lightning_ring.errors import RankDiscoveryError
from lightning_ring.job.ranks import discover_ranks

try:
    info = discover_ranks()
    place = (
        info.rank,
        info.world_size,
        info.local_rank,
        info.local_size,
        info.node_rank,
        info.num_nodes,
    )
    said = f"{info.source} {' '.join(map(str, place))}"
except RankDiscoveryError as error:
    said = f"RankDiscoveryError: {error}"
sys.stdout.write(f"{sys.argv[1]}: {said}\n")
