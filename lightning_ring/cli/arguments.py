"""Options that several commands share, and their checks."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

from lightning_ring.errors import ConfigurationError
from lightning_ring.launch.hosts import Host, parse_hosts, read_hostfile


def add_hosts(parser: argparse.ArgumentParser, what: str = "hosts, and ranks on each") -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", "--host", dest="hosts", metavar="HOST:SLOTS,...", help=what)
    where.add_argument("--hostfile", metavar="FILE", help="the same, one host a line: `gpu01 slots=4`")


def chosen_hosts(options: argparse.Namespace) -> list[Host]:
    if options.hosts is not None:
        return parse_hosts(options.hosts)
    return read_hostfile(options.hostfile) if options.hostfile is not None else []


def check_outputs(options: argparse.Namespace) -> None:
    """Raises `ConfigurationError` if a file of ``--json`` or ``--plot`` cannot be written: before minutes of work."""
    check_plot(options.plot, " --json FILE keeps the numbers without it.")
    for option, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None and (Path(path).is_dir() or not os.access(Path(path).absolute().parent, os.W_OK)):
            raise ConfigurationError(f"{option} {path}: cannot be written. Name a file in an existing folder.")


def check_plot(path: str | Path | None, alternative: str = "") -> None:
    """Raises `ConfigurationError` if matplotlib is not installed, or does not write files of that name."""
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        message = "--plot needs matplotlib, which is not installed: `pip install matplotlib`."
        raise ConfigurationError(message + alternative)
    if path is not None and Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise ConfigurationError(f"--plot {path}: the name of the file must end in .png, .svg or .pdf.")
