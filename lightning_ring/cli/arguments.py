"""Options that several commands share, and their checks."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from lightning_ring.errors import ConfigurationError
from lightning_ring.launch.hosts import Host, parse_hosts, read_hostfile


def add_ranks(
    parser: argparse.ArgumentParser, ranks: str, what: str = "hosts, and ranks on each"
) -> Any:
    """The number of ``ranks``, and where they run. Returns the group of the hosts' options, of
    which one at most may be given.
    """
    parser.add_argument("-n", "-np", "--num-proc", dest="ranks", type=int, metavar="N", help=ranks)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", "--host", "--hosts", dest="hosts", metavar="HOST:SLOTS,...", help=what)
    where.add_argument(
        "-hostfile", "--hostfile", metavar="FILE", help="the same, one host a line: `gpu01 slots=4`"
    )
    return where


def chosen_hosts(options: argparse.Namespace) -> list[Host]:
    """Raises `ConfigurationError`: the number of ranks, or a host, cannot be."""
    if options.ranks is not None and options.ranks < 1:
        raise ConfigurationError(f"-n {options.ranks}: the number of ranks must be 1 or more.")
    if options.hosts is not None:
        return parse_hosts(options.hosts)
    return read_hostfile(options.hostfile) if options.hostfile is not None else []


def check_output(option: str, path: str | Path | None) -> None:
    """Raises `ConfigurationError`, before minutes of work: the file ``path`` of ``option`` cannot
    be written.
    """
    if path is None:
        return
    path = Path(path)
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise ConfigurationError(
            f"{option} {path}: cannot be written. Name a file in an existing folder."
        )
