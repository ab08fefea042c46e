"""horovodrun's options, as of Horovod 0.28.1: those that ``ringrun`` takes, and what to use
instead of the others.
"""

from __future__ import annotations

import argparse
import os
import socket
from typing import Any

from lightning_ring.errors import ConfigurationError

# what to do instead of each option, and the option's names
_INSTEAD = """
nothing is cached; leave it out: --disable-cache
write the options on the command line, or into a shell script: --config-file
run the line of `ringrun --dry-run` with Open MPI's `--output dir=DIR` or \
`--output tag,timestamp`: --output-filename -prefix-timestamp --prefix-output-with-timestamp
set RING_SSH="ssh -p PORT -i KEY" for a job that goes on when ranks die, else write it into \
~/.ssh/config: -p --ssh-port -i --ssh-identity-file
DistributedOptimizer sends buckets of a fixed size; with a Trainer choose it by \
RingStrategy(bucket_cap_mb=...): --fusion-threshold-mb
there are no cycles to tune; leave it out: --cycle-time-ms
names are remembered without a limit to tune; leave it out: --cache-capacity
ranks on several hosts are nested by themselves; RingStrategy(topology=...) says otherwise: \
--hierarchical-allreduce --no-hierarchical-allreduce --torus-allreduce --no-torus-allreduce \
--hierarchical-allgather --no-hierarchical-allgather
nothing is tuned; with a Trainer RingStrategy(bucket_cap_mb=...) sets the size of buckets: \
--autotune --no-autotune --autotune-log-file --autotune-warmup-samples \
--autotune-steps-per-sample --autotune-bayes-opt-max-samples --autotune-gaussian-process-noise
use --wait-for-ranks SECONDS: --elastic-timeout
use --respawn-limit N, the deaths in a row of one slot: --reset-limit
use --respawn, which waits longer after each death, and --respawn-limit N: \
--blacklist-cooldown-range
leave it out; --timeline-mark-cycles asks for the marks: --no-timeline-mark-cycles
stalls are reported after 60 s; with a Trainer RingStrategy(stall_warning=..., timeout=...) sets \
the times: --no-stall-check --stall-check --stall-check-warning-time-seconds \
--stall-check-shutdown-time-seconds
nothing takes its place; leave it out: --mpi-threads-disable --no-mpi-threads-disable \
--num-nccl-streams --thread-affinity
run the line of `ringrun --dry-run` with what you want to add, or set Open MPI's variables, \
OMPI_MCA_*: --mpi-args --binding-args
set OMPI_MCA_btl=tcp,self: --tcp
a dead rank ends the wait at once; with a Trainer RingStrategy(timeout=...) bounds it: \
--gloo-timeout-seconds
in the script, logging.getLogger("lightning_ring").setLevel(logging.DEBUG): --log-level \
--log-with-timestamp --log-without-timestamp --log-hide-timestamp --no-log-hide-timestamp
use --no-mpi, which starts plain processes: --gloo
leave it out; mpirun is the default: --mpi
use ringrun or mpirun inside the LSF job: --jsrun
run `lightning-ring doctor`, which shows what is there and tries it: -cb --check-build
"""
INSTEAD = {
    name: instead
    for instead, _, names in (line.rpartition(": ") for line in _INSTEAD.strip().splitlines())
    for name in names.split()
}


class _Refused(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: Any,
        values: Any,
        option: str | None = None,
    ) -> None:
        instead = INSTEAD[self.option_strings[0]]
        raise ConfigurationError(
            f"{option} is an option of horovodrun that ringrun does not take. "
            f"{instead[0].upper()}{instead[1:]}."
        )


def add_horovodrun(parser: argparse.ArgumentParser) -> None:
    """The options of horovodrun that have no other name here, and the refusal of the rest."""
    add = parser.add_argument_group("as horovodrun takes them").add_argument
    add(
        "--network-interfaces",
        "--network-interface",
        dest="interfaces",
        action="append",
        metavar="IF,...",
        help="network interfaces that the ranks use, on every host",
    )
    add(
        "--timeline-filename",
        metavar="FILE",
        help="write a timeline, as HOROVOD_TIMELINE=FILE does",
    )
    add("--timeline-mark-cycles", action="store_true", help="mark exchanges of names in it")
    add(
        "--start-timeout",
        type=float,
        metavar="S",
        help="seconds in which all ranks have to come",
    )
    add("--verbose", action="store_true", help="no more than always: the line that is run is shown")
    for name in INSTEAD:
        parser.add_argument(name, action=_Refused, nargs="?", help=argparse.SUPPRESS)


def variables(options: argparse.Namespace, *, here: bool) -> dict[str, str]:
    """The environment variables that stand for these options. ``here``: this host has ranks.

    Raises:
        ConfigurationError: This host has no such interface; a time is not above 0.
    """
    found: dict[str, str] = {}
    if options.interfaces:
        words = ",".join(options.interfaces).split(",")
        names = [word.strip() for word in words if word.strip()]
        known = [name for _, name in socket.if_nameindex()]
        missing = [name for name in names if here and name not in known]
        if missing or not names:
            raise ConfigurationError(
                f"--network-interfaces {','.join(options.interfaces)}: this host has "
                f"{', '.join(known)}, and no {', '.join(missing) or 'interface without a name'}."
            )
        readers = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include")
        found |= dict.fromkeys(readers, ",".join(names))
    if options.timeline_filename:
        found["HOROVOD_TIMELINE"] = os.path.abspath(options.timeline_filename)
        found["HOROVOD_TIMELINE_MARK_CYCLES"] = str(int(options.timeline_mark_cycles))
    elif options.timeline_mark_cycles:
        raise ConfigurationError("--timeline-mark-cycles goes with --timeline-filename FILE.")
    if options.start_timeout is not None:
        if not options.start_timeout > 0:
            raise ConfigurationError(
                f"--start-timeout {options.start_timeout:g}: the seconds must be more than 0."
            )
        found["HOROVOD_START_TIMEOUT"] = f"{options.start_timeout:g}"
    return found
