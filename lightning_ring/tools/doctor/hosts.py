"""The doctor on this host, and on several: one doctor on each, started as ringrun starts ranks,
writes its report.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lightning_ring.launch.hosts import Host
from lightning_ring.tools.doctor import (
    deaths,
    gpus,
    launching,
    network,
    packages,
    reduction,
    resources,
)
from lightning_ring.tools.doctor.asking import DoctorRequest, ask, end_all
from lightning_ring.tools.doctor.findings import Finding, HostReport, broken, compare
from lightning_ring.tools.doctor.reduction import check_across, what_was_said

T = TypeVar("T")
R = TypeVar("R")

FAMILIES: dict[str, Callable[[DoctorRequest], list[Finding]]] = {
    "versions": packages.check_versions,
    "engine": launching.check_engine,
    "launcher": launching.check_launcher,
    "mpi": launching.check_mpi,
    "threads": resources.check_threads,
    "memory": resources.check_memory,
    "network": network.check,
    "gpus": gpus.check,
    "imports": packages.check_imports,
    "all-reduce": reduction.check,
    "deaths": deaths.check,
}


def examine(request: DoctorRequest, chosen: Sequence[str]) -> Iterator[tuple[str, list[Finding]]]:
    """Each chosen family and its findings, in order, as soon as it is done."""
    families = [family for family in FAMILIES if family in chosen]
    return zip(families, _side_by_side(functools.partial(_guarded, request), families), strict=True)


def _side_by_side(function: Callable[[T], R], inputs: Iterable[T]) -> Iterator[R]:
    """``function`` of each of ``inputs``, in threads: most of them wait for other processes."""
    with ThreadPoolExecutor(max_workers=32) as pool:
        try:
            yield from pool.map(function, inputs)
        except BaseException:  # told to stop: else the pool would wait for its threads' processes
            end_all()
            raise


def _guarded(request: DoctorRequest, family: str) -> list[Finding]:
    try:
        return FAMILIES[family](request)
    except Exception as error:  # the doctor has to survive errors that it did not foresee
        found = f"this check failed: {type(error).__name__}: {error}"
        return [
            broken(family, found, "The other lines hold. Please report this one to lightning_ring.")
        ]


PREFIX = "lightning_ring.tools.doctor.host "
_START_SECONDS = 30.0  # mpirun, ssh and Python, besides the checks
_CHECKS_SECONDS = 90.0  # imports on a cold network file system


def examine_hosts(
    hosts: Sequence[Host], chosen: Sequence[str], request: DoctorRequest
) -> tuple[list[HostReport], list[Finding]]:
    """Every host's report, and findings on what they have in common: versions, and an all-reduce
    between them.
    """
    ask_host = functools.partial(_report, len(hosts), chosen, request)
    reports = list(_side_by_side(ask_host, hosts))
    started = [report for report in reports if "start" not in report.families]
    between = compare(started) if len(started) > 1 else []
    if "all-reduce" in chosen and len(started) == len(hosts) > 1:
        between += check_across(hosts, request)
    return reports, between


def _report(
    num_hosts: int, chosen: Sequence[str], request: DoctorRequest, host: Host
) -> HostReport:
    # this host keeps what its shell has, for that may be what is wrong
    environ = request.environ if host.is_local else request.child_environ
    seconds = _START_SECONDS + _CHECKS_SECONDS + 2 * request.seconds
    answer = ask(_command(host, num_hosts, chosen, request), seconds, environ)
    for line in answer.stdout.splitlines():
        if line.startswith(PREFIX):
            with contextlib.suppress(ValueError):  # of a line that was cut
                return HostReport(
                    host.name, HostReport.from_json(json.loads(line.removeprefix(PREFIX))).families
                )
    said = what_was_said(answer.stderr)
    found = (
        "gave no report: it "
        f"{answer.problem or 'ended without a word'}{': ' + said if said else ''}"
    )
    advice = (
        f"`ssh {host.name} true` must work without a question, {sys.executable} with "
        "lightning_ring must be there, and firewalls must let mpirun through. `ringrun -n 1 -H "
        f"{host.name}:1 hostname` shows all that is said."
    )
    return HostReport(host.name, {"start": [broken("start", found, advice)]})


def _command(
    host: Host, num_hosts: int, chosen: Sequence[str], request: DoctorRequest
) -> list[str]:
    options = f"--part-of {num_hosts} -n {host.slots} --timeout {request.seconds:g} --only"
    doctor = [sys.executable, "-m", "lightning_ring.cli.main", "doctor", *options.split(), *chosen]
    # without mpirun, so that this host has a report also where mpirun is what is broken
    if host.is_local:
        return doctor
    ringrun = [sys.executable, "-m", "lightning_ring.cli.ringrun"]
    return [*ringrun, "-n", "1", "-H", f"{host.name}:1", "--", *doctor]
