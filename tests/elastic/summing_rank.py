"""A rank that sums buckets again and again, through `Generations`: ``summing_rank.py FOLDER BACKEND
STEPS DEATHS``.

DEATHS are ``NUMBER:STEP:BUCKET``: process NUMBER kills itself in STEP, after it has called for
BUCKET buckets; or ``NUMBER:GENERATION:open``: while the others wait for its first connection. Each
survivor writes NUMBER.json: its communicators, the segments of its buckets and how long opening
took in each generation, sums of the default group.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_ring.elastic.generations import Generations
from lightning_ring.elastic.member import Member
from lightning_ring.elastic.membership import Report
from lightning_ring.elastic.store import StewardStore
from lightning_ring.errors import PeerFailedError, RingError

CPU, LIMIT = torch.device("cpu"), timedelta(seconds=60)
NUMEL, BUCKETS = 1 << 20, 4


def segment_of(tensor):
    """The inode of the shared memory that the tensor lies in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, inode, *_ = line.split()
        start, stop = (int(address, 16) for address in addresses.split("-"))
        if start <= tensor.data_ptr() < stop:
            return inode
    raise AssertionError(f"no map holds {tensor.data_ptr():x}")


class Summing:
    def __init__(self, backend, deaths):
        self.member = Member()
        self.member.open()
        self.generations = Generations(self.member, backend, CPU, LIMIT, LIMIT)
        self.deaths = deaths
        self.step = None
        self.complete = False
        self.buckets = []
        self.result = {"communicators": [], "segments": [], "default": [], "opening": []}

    def enter(self):
        self.member.report(Report(self.step, self.complete))
        view = self.member.next_view(60)
        if f"{self.member.number}:{view.generation}:open" in self.deaths:
            StewardStore.get = die_when_awaited
        began = time.perf_counter()
        try:
            comm = self.generations.open(view)
        finally:
            self.result["opening"].append(time.perf_counter() - began)
        self.buckets.clear()
        self.buckets = [comm.empty(NUMEL, torch.float32, CPU) for _ in range(BUCKETS)]
        self.result["segments"].append(sorted(segment_of(bucket) for bucket in self.buckets))
        self.result["communicators"].append(type(comm).__name__)
        total = torch.tensor([float(self.member.number)])
        dist.all_reduce(total)
        assert total.item() == sum(view.members)
        self.result["default"].append(total.item())
        self.step, self.complete = view.step or 0, False
        return comm

    def sum_buckets(self, comm):
        works = []
        for index, bucket in enumerate(self.buckets):
            if f"{self.member.number}:{self.step}:{index}" in self.deaths:
                os.kill(os.getpid(), signal.SIGKILL)
            bucket.fill_(self.step + comm.rank + index)
            works.append(comm.all_reduce_(bucket))
        for index, work in enumerate(works):
            work.wait()
            total = sum(self.step + rank + index for rank in range(comm.world_size))
            assert self.buckets[index][0] == self.buckets[index][-1] == total
        self.complete = True
        comm.barrier()
        self.step, self.complete = self.step + 1, False

    def run(self, steps):
        broken = None
        while self.step is None or self.step < steps:
            try:
                if self.step is None or broken is not None:
                    self.generations.close(broken)
                    comm, broken = self.enter(), None
                self.sum_buckets(comm)
            # Gloo's own, of a group that did not come up, are no others
            except RuntimeError as error:
                if not self.member.is_over(3.0):
                    raise
                broken = error if isinstance(error, RingError) else PeerFailedError(str(error))
        comm.barrier()
        self.member.finish()
        self.generations.close()


plain_get = StewardStore.get


def die_when_awaited(store, key):
    if "members" not in key:  # this rank has told where it listens, and the others connect
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    return plain_get(store, key)


if __name__ == "__main__":
    folder, backend, steps, *deaths = sys.argv[1:]
    rank = Summing(backend, deaths)
    rank.run(int(steps))
    (Path(folder) / f"{rank.member.number}.json").write_text(json.dumps(rank.result))
