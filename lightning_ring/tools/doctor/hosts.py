"""The doctor on this host, and on several: one doctor on each, started as ringrun starts ranks,
writes its report.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from lightning_ring.launch.hosts import Host
from lightning_ring.tools.doctor import host, launching, packages, reduction
from lightning_ring.tools.doctor.asking import DoctorRequest, ask, end_all
from lightning_ring.tools.doctor.findings import Finding, HostReport, broken, compare

T = TypeVar("T")
R = TypeVar("R")

FAMILIES: dict[str, Callable[[DoctorRequest], Iterable[Finding]]] = {
    "versions": packages.check_versions,
    "engine": launching.check_engine,
    "launcher": launching.check_launcher,
    "mpi": launching.check_mpi,
    "threads": host.check_threads,
    "memory": host.check_memory,
    "network": host.check_network,
    "gpus": packages.check_gpus,
    "imports": packages.check_imports,
    "all-reduce": reduction.check,
}


def examine(request: DoctorRequest, chosen: Sequence[str]) -> Iterator[list[Finding]]:
    """The findings of each chosen family, in order, as soon as it is done."""
    families = [family for family in FAMILIES if family in chosen]
    return _side_by_side(partial(_guarded, request), families)


def _side_by_side(function: Callable[[T], R], inputs: Iterable[T]) -> Iterator[R]:
    """``function`` of each of ``inputs``, in threads: most of them wait for other processes."""
    with ThreadPoolExecutor(max_workers=32) as pool:
        try:
            yield from pool.map(function, inputs)
        except BaseException:  # told to stop: else the pool would wait for its threads' processes
            end_all()
            raise


def _guarded(request: DoctorRequest, family: str) -> list[Finding]:
    findings: list[Finding] = []
    try:
        findings.extend(FAMILIES[family](request))
    except Exception as error:  # the doctor has to survive errors that it did not foresee
        failed = broken(
            family,
            f"this check failed: {type(error).__name__}: {error}",
            "The other lines hold. Please report this one to lightning_ring.",
        )
        return [*findings, failed]
    return findings


PREFIX = "lightning_ring.tools.doctor.host "
_START_SECONDS = 30.0  # mpirun, ssh and Python, besides the checks
_CHECKS_SECONDS = 90.0  # imports on a cold network file system


def examine_hosts(
    hosts: Sequence[Host], chosen: Sequence[str], request: DoctorRequest
) -> tuple[list[HostReport], list[Finding]]:
    """Every host's report, and findings on what they have in common: versions, and an all-reduce
    between them.
    """
    reports = list(_side_by_side(partial(_report, len(hosts), chosen, request), hosts))
    started = [one for one in reports if all(found.name != "start" for found in one.findings)]
    between = compare(started) if len(started) > 1 else []
    if "all-reduce" in chosen and len(started) == len(hosts) > 1:
        between += reduction.check_across(hosts, request)
    return reports, between


def _report(
    num_hosts: int, chosen: Sequence[str], request: DoctorRequest, host: Host
) -> HostReport:
    options = f"--part-of {num_hosts} -n {host.slots} --timeout {request.seconds:g} --only"
    command = [sys.executable, "-m", "lightning_ring.cli.main", "doctor", *options.split(), *chosen]
    # This host keeps what its shell has, for that may be what is wrong, and needs no mpirun.
    environ = request.environ
    if not host.is_local:
        ringrun = [sys.executable, "-m", "lightning_ring.cli.ringrun", "-n", "1"]
        command = [*ringrun, "-H", f"{host.name}:1", "--", *command]
        environ = request.child_environ
    answer = ask(command, _START_SECONDS + _CHECKS_SECONDS + 2 * request.seconds, environ)
    for line in answer.stdout.splitlines():
        if line.startswith(PREFIX):
            with contextlib.suppress(ValueError):  # of a line that was cut
                read = json.loads(line.removeprefix(PREFIX))
                return HostReport(host.name, [Finding(**finding) for finding in read["findings"]])
    found = f"gave no report: it {answer.problem or 'ended without a word'}"
    if said := reduction.what_was_said(answer.stderr):
        found += f": {said}"
    unread = broken(
        "start",
        found,
        f"`ssh {host.name} true` must work without a question, {sys.executable} with "
        "lightning_ring must be there, and firewalls must let mpirun through. `ringrun -n 1 -H "
        f"{host.name}:1 hostname` shows all that is said.",
    )
    return HostReport(host.name, [unread])
