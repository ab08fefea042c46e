"""Pairs of forked ranks that leave while messages are under way: ``leaving_script.py FOLDER
PAIRS``.

Prints the exit codes of each pair, one pair a line. Rank 0 leaves with exit code 3 or by an
exception, rank 1 later.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_ring.comm.backends.gloo import open_torch_communicator

WAYS = ("receives", "gloo's own all-reduce", "sends", "an exception", "both leave")
kept = []  # as a script's globals are: the interpreter destroys them at its end


def run_rank(rank, way, store):
    """Ends with messages under way in both directions, each of several pieces."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    comm = open_torch_communicator("gloo")
    flat = torch.ones(4 * 2**20)
    comm.all_reduce_(flat).wait()
    under_way = []
    kept.extend((comm, flat, under_way))
    if way == "gloo's own all-reduce" and rank == 0:
        under_way.append(comm.all_reduce_(flat))
    elif way == "sends":  # the headers have met
        under_way.append(comm.broadcast_(flat))
        if rank == 1:
            time.sleep(0.2)
            os._exit(3)
    elif rank == 0 or way == "both leave":
        under_way += [comm.reduce_scatter_(flat), comm.all_gather_(flat)]
    if rank == 1 and way != "both leave":
        time.sleep(0.5)
    if way == "an exception":
        raise ValueError("the exit code is 1")
    sys.exit(3)


def main(folder, num_pairs):
    pairs = []  # all at the same time
    for pair in range(num_pairs):
        way = WAYS[pair % len(WAYS)]
        children = []
        pairs.append((way, children))
        for rank in range(2):
            child = os.fork()
            if not child:
                silence = os.open(os.devnull, os.O_WRONLY)
                os.dup2(silence, 1)
                os.dup2(silence, 2)
                run_rank(rank, way, folder / f"store.{pair}")
            children.append(child)
    for way, children in pairs:
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(f"{way}: {codes[0]} {codes[1]}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
