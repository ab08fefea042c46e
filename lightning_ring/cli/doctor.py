"""``lightning-ring doctor``: checks of the setup, with advice."""

from __future__ import annotations

import argparse
import json
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from lightning_ring.cli.arguments import add_ranks, chosen_hosts
from lightning_ring.errors import ConfigurationError, RankDiscoveryError
from lightning_ring.job.launchers import launcher_variables
from lightning_ring.tools.doctor.asking import DoctorRequest
from lightning_ring.tools.doctor.findings import (
    Finding,
    HostReport,
    last_line,
    lines,
    short,
    worst,
)
from lightning_ring.tools.doctor.hosts import FAMILIES, PREFIX, examine, examine_hosts
from lightning_ring.tools.doctor.launching import living_launcher


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    if not options.timeout > 0:
        raise ConfigurationError(
            f"--timeout {options.timeout:g}: must be more than 0 seconds, such as 60."
        )
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run(options)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-ring doctor",
        description="Check that ranks can start, meet and exchange gradients here. Each line is "
        "ok, warning or broken, with what to do. Nothing is changed.",
        epilog="Exit code: 0, also with warnings; 1 if something is broken; 2 if this command "
        "line is wrong.",
    )
    add = parser.add_argument
    add_ranks(
        parser,
        "ranks here (default: one a GPU, min. 2)",
        "check these hosts, and compare them",
    )
    add("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="default: all of them")
    add(
        "--timeout",
        type=float,
        default=60,
        metavar="SECONDS",
        help="of each all-reduce (default: 60); a higher limit extends the other checks too",
    )
    add("--json", action="store_true", help="write the report as JSON")
    # of how many hosts this is one: how the doctor starts itself there
    add("--part-of", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def _run(options: argparse.Namespace) -> int:
    hosts = chosen_hosts(options)
    num_gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))  # the driver itself may hang
    request = DoctorRequest(
        ranks=options.ranks or max(2, num_gpus),
        num_hosts=options.part_of or len(hosts) or 1,
        seconds=options.timeout,
        launcher=living_launcher(),
        part=options.part_of > 0,
    )
    here = HostReport(socket.gethostname(), [])
    if request.part:
        here.findings.extend(chain.from_iterable(examine(request, options.only)))
        print(PREFIX + json.dumps(here.as_json()), flush=True)
        return 0
    if request.launcher and _is_another_rank(request.environ):
        return 0  # rank 0 of this job reports
    if not hosts:
        for findings in examine(request, options.only):
            here.findings.extend(findings)
            if not options.json and findings:
                print(*lines(findings), sep="\n", flush=True)
        return _conclude(options, [here], [])
    reports, between = examine_hosts(hosts, options.only, request)
    if not options.json:
        for report in reports:
            print(f"{report.host}:", *lines(short(report.findings)), "", sep="\n")
        print("between hosts:", *lines(between), "", sep="\n")
    return _conclude(options, reports, between)


def _conclude(
    options: argparse.Namespace, reports: Sequence[HostReport], between: Sequence[Finding]
) -> int:
    findings = [*chain.from_iterable(report.findings for report in reports), *between]
    state = worst(findings)
    if options.json:
        whole = {
            "state": state,
            "hosts": [report.as_json() for report in reports],
            "between_hosts": [asdict(finding) for finding in between],
        }
        print(json.dumps(whole, indent=1))
    else:
        print(last_line(findings))
    return int(state == "broken")


def _is_another_rank(environ: Mapping[str, str]) -> bool:
    try:
        found = launcher_variables(environ)
    except RankDiscoveryError:
        return False
    return found is not None and found.rank > 0
