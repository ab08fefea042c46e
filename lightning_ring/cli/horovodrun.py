"""horovodrun's options, as of Horovod 0.28.1: those that ``ringrun`` takes, and what to use
instead of the others.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
from collections.abc import Sequence
from typing import Any

from lightning_ring.errors import ConfigurationError
from lightning_ring.launch.mpirun import find_mpirun

_NOTHING = "nothing takes its place; leave it out"
_SSH = (
    'set RING_SSH="ssh -p PORT -i KEY" for a job that goes on when ranks die, else write it into '
    "~/.ssh/config"
)
_MPI = (
    "run the line of `ringrun --dry-run` with what you want to add, or set Open MPI's variables, "
    "OMPI_MCA_*"
)
_OUTPUT = (
    "run the line of `ringrun --dry-run` with Open MPI's `--output dir=DIR` or `--output "
    "tag,timestamp`"
)
_LOG = 'in the script, logging.getLogger("lightning_ring").setLevel(logging.DEBUG)'
_BUCKETS = (
    "DistributedOptimizer sends buckets of a fixed size; with a Trainer choose it by "
    "RingStrategy(bucket_cap_mb=...)"
)
_AUTO = 'with a Trainer RingStrategy(bucket_cap_mb="auto") measures and chooses'
_TOPOLOGY = (
    "ranks on several hosts are nested by themselves; RingStrategy(topology=...) says otherwise"
)
_STALLS = (
    "stalls are reported after 60 s; with a Trainer RingStrategy(stall_warning=..., timeout=...) "
    "sets the times"
)
INSTEAD = {  # of each option
    "--disable-cache": "nothing is cached; leave it out",
    "--output-filename": _OUTPUT,
    "--config-file": "write the options on the command line, or into a shell script",
    "--ssh-port": _SSH,
    "--ssh-identity-file": _SSH,
    "--fusion-threshold-mb": _BUCKETS,
    "--cycle-time-ms": "there are no cycles to tune; leave it out",
    "--cache-capacity": "names are remembered without a limit to tune; leave it out",
    **dict.fromkeys(
        ("--hierarchical-allreduce", "--no-hierarchical-allreduce", "--torus-allreduce"), _TOPOLOGY
    ),
    **dict.fromkeys(
        ("--no-torus-allreduce", "--hierarchical-allgather", "--no-hierarchical-allgather"),
        _TOPOLOGY,
    ),
    **dict.fromkeys(
        ("--autotune", "--no-autotune", "--autotune-log-file", "--autotune-warmup-samples"), _AUTO
    ),
    **dict.fromkeys(("--autotune-steps-per-sample", "--autotune-bayes-opt-max-samples"), _AUTO),
    "--autotune-gaussian-process-noise": _AUTO,
    "--elastic-timeout": "use --wait-for-ranks SECONDS",
    "--reset-limit": "use --respawn-limit N, the deaths in a row of one slot",
    "--blacklist-cooldown-range": "use --respawn, which waits longer after each death, and "
    "--respawn-limit N",
    "--no-timeline-mark-cycles": "leave it out; --timeline-mark-cycles asks for the marks",
    **dict.fromkeys(
        ("--no-stall-check", "--stall-check", "--stall-check-warning-time-seconds"), _STALLS
    ),
    "--stall-check-shutdown-time-seconds": _STALLS,
    "--mpi-threads-disable": _NOTHING,
    "--no-mpi-threads-disable": _NOTHING,
    "--mpi-args": _MPI,
    "--tcp": "set OMPI_MCA_btl=tcp,self",
    "--binding-args": _MPI,
    "--num-nccl-streams": _NOTHING,
    "--thread-affinity": _NOTHING,
    "--gloo-timeout-seconds": "a dead rank ends the wait at once; with a Trainer "
    "RingStrategy(timeout=...) bounds it",
    "--log-level": _LOG,
    "--log-with-timestamp": _LOG,
    "--log-without-timestamp": _LOG,
    "--log-hide-timestamp": _LOG,
    "--no-log-hide-timestamp": _LOG,
    "--prefix-output-with-timestamp": _OUTPUT,
    "--gloo": "use --no-mpi, which starts plain processes",
    "--mpi": "leave it out; mpirun is the default",
    "--jsrun": "use ringrun or mpirun inside the LSF job",
}
_SHORT = {
    "--ssh-port": ("-p",),
    "--ssh-identity-file": ("-i",),
    "--prefix-output-with-timestamp": ("-prefix-timestamp",),
}


class _Refused(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: Any,
        values: Any,
        option: str | None = None,
    ) -> None:
        raise ConfigurationError(
            f"{option} is an option of horovodrun that ringrun does not take. {self.metavar}."
        )


def add_horovodrun(parser: argparse.ArgumentParser) -> None:
    """The options of horovodrun that have no other name here, and the refusal of the rest."""
    group = parser.add_argument_group("as horovodrun takes them")
    group.add_argument(
        "--network-interfaces",
        "--network-interface",
        dest="interfaces",
        action="append",
        metavar="IF,...",
        help="network interfaces that the ranks use, on every host",
    )
    group.add_argument(
        "--timeline-filename",
        metavar="FILE",
        help="write a timeline, as HOROVOD_TIMELINE=FILE does",
    )
    group.add_argument(
        "--timeline-mark-cycles", action="store_true", help="mark exchanges of names in it"
    )
    group.add_argument(
        "--start-timeout", type=float, metavar="S", help="seconds in which all ranks have to come"
    )
    group.add_argument(
        "--verbose", action="store_true", help="no more than always: the line that is run is shown"
    )
    group.add_argument(
        "-cb",
        "--check-build",
        action="store_true",
        help="what is installed; `lightning-ring doctor`",
    )
    for name, instead in INSTEAD.items():
        metavar = instead[0].upper() + instead[1:]
        names = (*_SHORT.get(name, ()), name)
        parser.add_argument(
            *names, action=_Refused, nargs="?", metavar=metavar, help=argparse.SUPPRESS
        )


def variables(options: argparse.Namespace, *, here: bool) -> dict[str, str]:
    """The environment variables that stand for these options. ``here``: this host has ranks.

    Raises:
        ConfigurationError: This host has no such interface; a time is not above 0.
    """
    found: dict[str, str] = {}
    if options.interfaces:
        names = [
            name.strip()
            for entry in options.interfaces
            for name in entry.split(",")
            if name.strip()
        ]
        known = [name for _, name in socket.if_nameindex()]
        missing = [name for name in names if here and name not in known]
        if missing or not names:
            raise ConfigurationError(
                f"--network-interfaces {','.join(options.interfaces)}: this host has "
                f"{', '.join(known)}, and no {', '.join(missing) or 'interface without a name'}."
            )
        found["GLOO_SOCKET_IFNAME"] = found["NCCL_SOCKET_IFNAME"] = found[
            "OMPI_MCA_btl_tcp_if_include"
        ] = ",".join(names)
    if options.timeline_filename is not None:
        path = os.path.abspath(options.timeline_filename)
        found["HOROVOD_TIMELINE"] = path
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


def check_build() -> str:
    """What horovodrun shows for ``--check-build``, of this package."""
    import torch  # deferred: it takes seconds, and nothing else here needs it

    mpirun = find_mpirun()
    mpi = mpirun is not None and importlib.util.find_spec("mpi4py") is not None
    nccl = torch.distributed.is_nccl_available()
    return "\n".join(
        [
            "lightning_ring, with Horovod's API for PyTorch (lightning_ring.horovod):",
            "",
            "Available Frameworks:",
            *_boxes({"TensorFlow": False, f"PyTorch {torch.__version__}": True, "MXNet": False}),
            "",
            "Available Controllers:",
            *_boxes(
                {f"MPI ({mpirun.version})" if mpirun is not None else "MPI": mpi, "Gloo": True}
            ),
            "",
            "Available Tensor Operations:",
            *_boxes(
                {
                    "NCCL": nccl,
                    "DDL": False,
                    "CCL": False,
                    "MPI": mpi,
                    "Gloo": True,
                    "shared memory": True,
                }
            ),
            "",
            "`lightning-ring doctor` tries them.",
        ]
    )


def _boxes(found: dict[str, bool]) -> Sequence[str]:
    return [f"    [{'X' if there else ' '}] {name}" for name, there in found.items()]
