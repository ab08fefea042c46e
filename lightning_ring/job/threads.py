"""The number of torch's threads in a rank: those of all ranks on a node together fit its cores."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from lightning_ring.job.members import JobMember
from lightning_ring.job.ranks import RankInfo

_log = logging.getLogger("lightning_ring")


def fit_threads(info: RankInfo, members: Sequence[JobMember]) -> None:
    """Give this rank's share of its node's cores to torch, unless the user chose, and log it once.

    The user chose by OMP_NUM_THREADS, by MKL_NUM_THREADS or by `torch.set_num_threads`; torch
    itself takes every core.
    """
    own = members[info.rank]
    node = [member for member in members if member.node == own.node]
    share = num_threads(own, node)
    before = torch.get_num_threads()
    chosen = is_chosen(before, len(own.cores), dict(os.environ))
    if not chosen and before != share:
        torch.set_num_threads(share)
    if info.local_rank == 0:
        report(node, torch.get_num_threads(), chosen, log_fit=info.rank == 0)


def num_threads(own: JobMember, node: Sequence[JobMember]) -> int:
    """This rank's share of the cores that the ranks of its ``node`` may use: 1 at least, at most
    those it is bound to.

    Ranks that a launcher bound to cores of their own keep those; others, in a container for
    instance, see the same cores and divide them, or what its quota leaves of them.
    """
    return max(1, min(len(own.cores), num_usable(node) // len(node)))


def num_usable(node: Sequence[JobMember]) -> int:
    """How many cores the ranks of a node can keep busy together."""
    together = {core for member in node for core in member.cores}
    return max(1, int(min(len(together), node[0].quota)))


def is_chosen(threads: int, num_cores: int, environ: dict[str, str]) -> bool:
    """Whether the user chose torch's ``threads``. Torch takes as many as processors, or half of
    that.
    """
    if "OMP_NUM_THREADS" in environ or "MKL_NUM_THREADS" in environ:
        return True
    processors = (num_cores, os.cpu_count() or 1)
    return threads not in (
        processors + tuple(number // 2 for number in processors) if two_a_core() else processors
    )


def two_a_core() -> bool:
    """Whether cores run two hardware threads each; torch then takes half as many threads as
    there are.
    """
    try:
        return Path("/sys/devices/system/cpu/smt/active").read_text().strip() == "1"
    except OSError:
        return False


def report(node: Sequence[JobMember], threads: int, chosen: bool, *, log_fit: bool) -> None:
    """Log at INFO that ``threads`` a rank fit the cores of a ``node``, else a warning with
    advice.
    """
    ranks = len(node)
    together = {core for member in node for core in member.cores}
    usable = num_usable(node)
    tightest = min(len(member.cores) for member in node)
    bound = ranks > 1 and any(set(member.cores) != together for member in node)
    there = os.cpu_count() or 1
    if bound and (threads > tightest or (len(together) < there and tightest < there // ranks)):
        _log.warning(
            "The launcher bound each of the %d ranks on this node to %d of its %d cores, for %d "
            "thread(s) a rank. Start them with `mpirun --bind-to none` or `ringrun`, or give "
            "each more cores (`--map-by slot:PE=%d`).",
            ranks,
            tightest,
            there,
            threads,
            max(1, there // ranks),
        )
    elif ranks * threads > usable and threads > 1:
        _log.warning(
            "%d ranks with %d threads each share the %d core(s) of this node: they will wait for "
            "each other. Set OMP_NUM_THREADS=%d, or leave it unset.",
            ranks,
            threads,
            usable,
            max(1, usable // ranks),
        )
    elif log_fit:
        reason = "as OMP_NUM_THREADS or the script asks" if chosen else "their share of the cores"
        _log.info(
            "%d ranks on this node, %d cores: %d thread(s) a rank, %s.",
            ranks,
            usable,
            threads,
            reason,
        )
