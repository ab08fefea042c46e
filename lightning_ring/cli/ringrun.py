"""``ringrun``: start a job on this host or on several, with all that mpirun needs to be told."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence

from lightning_ring.cli.arguments import add_ranks, chosen_hosts
from lightning_ring.cli.horovodrun import add_horovodrun, variables
from lightning_ring.errors import ConfigurationError, RingError
from lightning_ring.launch.discovery import Discovery
from lightning_ring.launch.elastic import ElasticJob, ElasticLimits
from lightning_ring.launch.hosts import check_slots, hosts_of_allocation
from lightning_ring.launch.mpirun import mpirun_line, rank_environment, require_mpirun
from lightning_ring.launch.process_ends import RespawnLimits
from lightning_ring.launch.remote import srun_line, ssh_line
from lightning_ring.launch.start import mpirun_job, plain_job, ranks_of
from lightning_ring.launch.supervisor import STOP_SIGNAL

# of jobs that go on when ranks die
_LIMITS = ("min_ranks", "max_ranks", "wait_for_ranks", "respawn_limit")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``ringrun``; the exit code is the job's, or 2 where the command line was wrong."""
    try:
        return _run(_parser().parse_args(arguments))
    except RingError as error:
        print(f"ringrun: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ringrun",
        description="Start COMMAND as N ranks through mpirun, on this host or on several; show "
        "the line that is run.",
        epilog="Ctrl-C and SIGTERM ask the ranks to stop and save; RING_STOP_GRACE (30 s) later "
        "they are ended.",
    )
    add = parser.add_argument
    add_ranks(parser, "number of ranks (default: all slots)").add_argument(
        "--discover",
        "--host-discovery-script",
        dest="discover",
        metavar="COMMAND",
        help="a command that writes one host a line, run again and again: ranks start on new hosts",
    )
    add("--dry-run", action="store_true", help="show the line and run nothing")
    add(
        "--no-mpi",
        action="store_true",
        help="plain processes on this host (Gloo or NCCL), no mpirun",
    )
    elastic = parser.add_argument_group(
        "a job that goes on when ranks die (plain processes, an elastic strategy)"
    ).add_argument
    for names, text in (
        (("--min-ranks", "--min-np", "--min-num-proc"), "go on with N ranks or more"),
        (("--max-ranks", "--max-np", "--max-num-proc"), "never more than N ranks"),
        (("--respawn-limit",), "deaths of a rank in a row (default: 5)"),
        (("--slots-per-host",), "ranks on a host that --discover lists without slots (default: 1)"),
    ):
        elastic(*names, type=int, metavar="N", help=text)
    elastic(
        "--wait-for-ranks",
        type=float,
        metavar="S",
        help="seconds to wait for N ranks (default: 600)",
    )
    elastic("--respawn", action="store_true", help="start a new process for each that dies")
    add_horovodrun(parser)
    add(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="a .py file runs in this Python",
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    hosts, discovery, elastic = chosen_hosts(options), _discovery(options), _is_elastic(options)
    if elastic and not hosts and discovery is None and "SLURM_JOB_ID" in os.environ:
        hosts = hosts_of_allocation(os.environ)
    if discovery and options.ranks is None:
        options.ranks = options.min_ranks or 1
    if options.ranks is None and not hosts:
        raise ConfigurationError(
            "how many ranks? Say -n N, or give hosts and their slots, as in -H host1:4,host2:4."
        )
    ranks = options.ranks if options.ranks is not None else sum(host.slots for host in hosts)
    if hosts:
        check_slots(ranks, hosts)
    others = [host.name for host in hosts if not host.is_local]
    here = discovery is None and (not hosts or len(others) < len(hosts))
    environ = dict(os.environ) | variables(options, here=here)
    command = resolve_command(options.command)
    if elastic:
        limits = _elastic_limits(options, ranks)
        if options.dry_run:
            agents = f", started by agents on {', '.join(others)}" if others else ""
            print(f"{ranks_of(ranks, command)}{agents}")
            return 0
        chosen = discovery or options.hosts or options.hostfile
        through = srun_line if "SLURM_JOB_ID" in os.environ and not chosen else ssh_line
        return ElasticJob(command, limits, environ, hosts, through, discovery).run()
    if options.no_mpi:
        if others:
            raise ConfigurationError(
                "--no-mpi starts processes on this host only; leave -H and --hostfile out."
            )
        if options.dry_run:
            print(ranks_of(ranks, command))
            return 0
        return plain_job(ranks, command, environ).run()
    mpirun = require_mpirun()
    if options.dry_run:
        environ = rank_environment(ranks, hosts, environ, STOP_SIGNAL)
        line = mpirun_line(mpirun, ranks, command, hosts, environ)
        print(f"OMP_NUM_THREADS={environ['OMP_NUM_THREADS']} {shlex.join(line)}")
        return 0
    return mpirun_job(mpirun, ranks, command, hosts, environ).run()


def _is_elastic(options: argparse.Namespace) -> bool:
    given = [getattr(options, name) for name in ("discover", *_LIMITS)]
    return options.respawn or any(value is not None for value in given)


def _elastic_limits(options: argparse.Namespace, ranks: int) -> ElasticLimits:
    """The limits of a job that goes on when ranks die."""
    given = {name: getattr(options, name) for name in _LIMITS if getattr(options, name) is not None}
    limit = given.pop("respawn_limit", None)
    if limit is not None and (not options.respawn or limit < 1):
        raise ConfigurationError(
            f"--respawn-limit {limit}: it is 1 or more, and goes with --respawn."
        )
    if given.get("wait_for_ranks", 0.0) < 0:
        raise ConfigurationError(
            f"--wait-for-ranks {given['wait_for_ranks']:g}: the seconds must be 0 or more."
        )
    if options.start_timeout is not None:
        given["start_seconds"] = options.start_timeout
    respawn = None
    if options.respawn:
        respawn = RespawnLimits() if limit is None else RespawnLimits(limit)
    return ElasticLimits(ranks, respawn=respawn, **given)


def _discovery(options: argparse.Namespace) -> Discovery | None:
    slots = options.slots_per_host
    if slots is not None and (options.discover is None or slots < 1):
        raise ConfigurationError(
            f"--slots-per-host {slots}: it is 1 or more, and goes with --discover."
        )
    if options.discover is None:
        return None
    words = shlex.split(options.discover)
    if not words or shutil.which(words[0]) is None:
        raise ConfigurationError(
            f"--discover {options.discover!r}: no such command. It writes one host:slots a line."
        )
    return Discovery(words, slots or 1)


def resolve_command(command: Sequence[str]) -> list[str]:
    """``command`` with the running Python in front of a ``.py`` file, and in the place of
    ``python``.
    """
    words = list(command[1:] if command[:1] == ["--"] else command)
    if not words:
        raise ConfigurationError("No command to run. For example: ringrun -n 2 train.py")
    if words[0] in ("python", "python3"):
        return [sys.executable, *words[1:]]
    if words[0].endswith(".py"):
        if not os.path.exists(words[0]):
            raise ConfigurationError(f"{words[0]}: no such file in {os.getcwd()}.")
        return [sys.executable, *words]
    if shutil.which(words[0]) is None:
        raise ConfigurationError(
            f"{words[0]}: no such command on PATH. A Python script is named with its .py."
        )
    return words


if __name__ == "__main__":
    sys.exit(main())
