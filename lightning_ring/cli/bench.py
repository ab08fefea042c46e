"""``lightning-ring bench``: times the collectives of every backend, in ranks that it, or another
launcher, starts.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Sequence

from lightning_ring.cli.arguments import add_ranks, check_output, chosen_hosts
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.cores import available_cores
from lightning_ring.job.launchers import LaunchVariables, launcher_variables
from lightning_ring.launch.hosts import check_slots
from lightning_ring.launch.mpirun import find_mpirun, require_mpirun
from lightning_ring.launch.start import mpirun_job, plain_job
from lightning_ring.tools.bench import BACKENDS, COLLECTIVES

_SIZES = ",".join(str(1024 * 4**power) for power in range(10))  # 1 KiB to 256 MiB


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    sizes = [parse_size(text) for text in options.sizes.split(",")]
    _check(options)
    launched = launcher_variables(os.environ)
    if launched is None:
        return _start_ranks(options, list(arguments))
    _check_launched(options, launched)
    from lightning_ring.tools.bench.session import run  # after the checks, which need no torch

    return run(options, sizes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-ring bench",
        description="Time all-reduce, reduce-scatter and all-gather over sizes, for every "
        "backend that works here. Backends take turns, so that ratios are fair, and results are "
        "checked. Bandwidths are those of nccl-tests.",
        epilog="Sizes are bytes: 4K, 25M, 1G count in powers of 1024 (KiB, MiB, GiB), 25MB is "
        "25,000,000. Under mpirun, srun or torchrun it runs with the ranks that they started.",
    )
    add = parser.add_argument
    add_ranks(parser, "ranks (default: one a GPU, or a core)")
    add(
        "--sizes",
        metavar="SIZE,...",
        default=_SIZES,
        help="tensors on each rank (default: 1K to 256M, each 4 times the one before)",
    )
    add("--backends", nargs="+", choices=BACKENDS, help="default: all that work here")
    add("--collectives", nargs="+", choices=COLLECTIVES, default=COLLECTIVES, help="default: all")
    add(
        "--compare",
        choices=BACKENDS,
        metavar="BACKEND",
        help="show times as ratios to this one's",
    )
    add("--device", choices=("auto", "cpu", "cuda", "xpu"), default="auto")
    add(
        "--seconds",
        type=float,
        default=0.2,
        help="for each backend, collective, size (default: 0.2)",
    )
    add("--json", metavar="FILE", help="write all numbers, in bytes and seconds (rank 0's host)")
    return parser


def parse_size(text: str) -> int:
    """``"4K"``: 4096. Raises `ConfigurationError` if ``text`` is no size, or less than one
    float32.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    size = 0.0
    if match:
        unit = 1000 if match[3] in ("B", "b") else 1024
        size = float(match[1]) * unit ** ("", "K", "M", "G").index(match[2].upper())
    if size < 4:
        raise ConfigurationError(
            f"--sizes: {text!r} is not a size of at least one float32. Write 4 bytes or more, or a "
            "number with K, M, G: 64K, 25M."
        )
    return int(size)


def _check(options: argparse.Namespace) -> None:
    """Raises `ConfigurationError` for an option that cannot work, before minutes of measuring."""
    if not 0 < options.seconds < math.inf:
        raise ConfigurationError(f"--seconds {options.seconds}: must be more than 0, such as 0.2.")
    if options.compare and options.backends and options.compare not in options.backends:
        raise ConfigurationError(
            f"--compare {options.compare} is not among --backends {' '.join(options.backends)}."
        )
    check_output("--json", options.json)


def _check_launched(options: argparse.Namespace, launched: LaunchVariables) -> None:
    if options.ranks not in (None, launched.world_size):
        started = f"{launched.launcher} started {launched.world_size} ranks"
        raise ConfigurationError(f"-n {options.ranks}, but {started}. Leave -n out here.")
    if (options.hosts or options.hostfile) and "RING_LAUNCHER_PID" not in os.environ:
        raise ConfigurationError(
            f"-H and --hostfile choose hosts, but {launched.launcher} has. Leave them out here."
        )
    _check_number(launched.world_size)


def _check_number(ranks: int) -> None:
    if ranks < 2:
        raise ConfigurationError(f"{ranks} rank(s) exchange nothing. Start 2 or more (-n 2).")


def _start_ranks(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run this command again in every rank, through mpirun or, without one, as plain processes
    of this host.
    """
    hosts = chosen_hosts(options)
    ranks = options.ranks
    if ranks is None:
        ranks = sum(host.slots for host in hosts) or _default_ranks(options.device)
    _check_number(ranks)
    if hosts:
        check_slots(ranks, hosts)
    mpirun = require_mpirun() if hosts else find_mpirun()
    command = [sys.executable, "-m", "lightning_ring.cli.main", "bench", *arguments]
    if mpirun is None:
        return plain_job(ranks, command, os.environ).run()
    return mpirun_job(mpirun, ranks, command, hosts, os.environ).run()


def _default_ranks(device: str) -> int:
    if device != "cpu":
        import torch

        if torch.accelerator.device_count() > 1:
            return torch.accelerator.device_count()
    return max(2, available_cores())
