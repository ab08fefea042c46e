"""How many threads a rank computes with: those of all ranks on a node fit its cores."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.distributed import PrefixStore, Store

from lightning_ring.host.cores import bound_cores, cgroup_quota
from lightning_ring.job.ranks import RankInfo

_log = logging.getLogger("lightning_ring")


@dataclass(frozen=True, slots=True)
class Cores:
    """What one rank may use: its node, the cores it is bound to, and how many a container's quota allows at a time."""

    node: int
    bound_to: list[int]
    quota: float


def fit_threads(info: RankInfo, store: Store) -> None:
    """Give this rank's share of its node's cores to torch, unless the user chose, and say so once. Collective.

    The user chose by OMP_NUM_THREADS, by MKL_NUM_THREADS or by `torch.set_num_threads`; torch itself takes every core.
    """
    store = PrefixStore("threads", store)
    mine = Cores(info.node_rank, bound_cores(), cgroup_quota())
    store.set(str(info.rank), json.dumps(asdict(mine)))
    everyones = [Cores(**json.loads(store.get(str(rank)))) for rank in range(info.world_size)]
    node = [cores for cores in everyones if cores.node == info.node_rank]
    share = num_threads(mine, node)
    before = torch.get_num_threads()
    chosen = is_chosen(before, len(mine.bound_to), dict(os.environ))
    if not chosen and before != share:
        torch.set_num_threads(share)
    if info.local_rank == 0:
        report(node, torch.get_num_threads(), chosen, say_fit=info.rank == 0)


def num_threads(mine: Cores, node: Sequence[Cores]) -> int:
    """This rank's share of the cores that the ranks of its ``node`` may use: 1 at least, at most those it is bound to.

    Ranks that a launcher bound to cores of their own keep those; others, in a container for instance, see the same
    cores and divide them, or what its quota leaves of them.
    """
    return max(1, min(len(mine.bound_to), num_usable(node) // len(node)))


def num_usable(node: Sequence[Cores]) -> int:
    """How many cores the ranks of a node can keep busy together."""
    together = set().union(*(cores.bound_to for cores in node))
    return max(1, int(min(len(together), node[0].quota)))


def is_chosen(threads: int, num_cores: int, environ: dict[str, str]) -> bool:
    """Whether torch's ``threads`` are somebody's choice: its own are as many as the cores, or half with two a core."""
    if "OMP_NUM_THREADS" in environ or "MKL_NUM_THREADS" in environ:
        return True
    processors = (num_cores, os.cpu_count() or 1)
    return threads not in (processors + tuple(number // 2 for number in processors) if two_a_core() else processors)


def two_a_core() -> bool:
    """Whether cores run two hardware threads each; torch then takes half as many threads as there are."""
    try:
        return Path("/sys/devices/system/cpu/smt/active").read_text().strip() == "1"
    except OSError:
        return False


def report(node: Sequence[Cores], threads: int, chosen: bool, *, say_fit: bool) -> None:
    """Log how ``threads`` fit the cores of a ``node``: at INFO that they do, else a warning that says what to do."""
    ranks = len(node)
    together = set().union(*(cores.bound_to for cores in node))
    usable = num_usable(node)
    tightest = min(len(cores.bound_to) for cores in node)
    bound = ranks > 1 and any(set(cores.bound_to) != together for cores in node)
    there = os.cpu_count() or 1
    if bound and (threads > tightest or (len(together) < there and tightest < there // ranks)):
        _log.warning(
            "The launcher bound each of the %d ranks on this node to %d of its %d cores, for %d thread(s) a rank. "
            "Start them with `mpirun --bind-to none` or `ringrun`, or give each more cores (`--map-by slot:PE=%d`).",
            ranks,
            tightest,
            there,
            threads,
            max(1, there // ranks),
        )
    elif ranks * threads > usable and threads > 1:
        _log.warning(
            "%d ranks with %d threads each share the %d core(s) of this node: they will wait for each other. Set "
            "OMP_NUM_THREADS=%d, or leave it unset.",
            ranks,
            threads,
            usable,
            max(1, usable // ranks),
        )
    elif say_fit:
        who = "as OMP_NUM_THREADS or the script asks" if chosen else "their share of the cores"
        _log.info("%d ranks on this node, %d cores: %d thread(s) a rank, %s.", ranks, usable, threads, who)
