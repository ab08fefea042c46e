"""The doctor on this host, and on several: one doctor on each, started as ringrun starts ranks.

Each host's doctor writes lines of JSON: the port at which it listens, its report, and the hosts that it reached.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lightning_ring.launch.hosts import Host
from lightning_ring.tools.doctor import gpus, launching, network, packages, reduction, resources
from lightning_ring.tools.doctor.asking import Request, end, end_all, start
from lightning_ring.tools.doctor.findings import Finding, HostReport, broken, compare, ok
from lightning_ring.tools.doctor.reduction import check_across, what_was_said

FAMILIES: dict[str, Callable[[Request], list[Finding]]] = {
    "versions": packages.check_versions,
    "launcher": launching.check_launcher,
    "mpi": launching.check_mpi,
    "threads": resources.check_threads,
    "memory": resources.check_memory,
    "network": network.check,
    "gpus": gpus.check,
    "imports": packages.check_imports,
    "all-reduce": reduction.check,
}


def examine(request: Request, chosen: Sequence[str]) -> Iterator[tuple[str, list[Finding]]]:
    """Each chosen family and its findings, in order, as soon as it is done. Families run side by side: most of them
    wait for other processes."""
    families = [family for family in FAMILIES if family in chosen]
    with ThreadPoolExecutor(max_workers=max(1, len(families))) as pool:
        try:
            futures = [pool.submit(_guarded, family, request) for family in families]
            for family, future in zip(families, futures, strict=True):
                yield family, future.result()
        except BaseException:  # told to stop: else the pool would wait for its threads' processes
            end_all()
            raise


def _guarded(family: str, request: Request) -> list[Finding]:
    try:
        return FAMILIES[family](request)
    except Exception as error:  # the doctor has to survive errors that it did not foresee
        found = f"this check failed: {type(error).__name__}: {error}"
        return [broken(family, found, "The other lines hold. Please report this one to lightning_ring.")]


PREFIX = "lightning_ring.tools.doctor.host "
_START_SECONDS = 30.0  # mpirun, ssh and Python, besides the checks
_CHECKS_SECONDS = 90.0  # imports on a cold network file system
_KNOCK_SECONDS = 15.0


class HostDoctor:
    """The doctor on one host, while it runs."""

    def __init__(self, host: Host, command: Sequence[str], environ: dict[str, str]) -> None:
        self.host = host.name
        self.messages: dict[str, Any] = {}
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._errors: list[str] = []
        self._process = start(command, environ, answering=True)
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._read_errors, daemon=True).start()

    def wait_for(self, kind: str, deadline: float) -> bool:
        """Read messages until there is one of ``kind``; false if it ended, or did not come in time."""
        while kind not in self.messages:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return False
            if line is None:
                return False
            with contextlib.suppress(json.JSONDecodeError):  # a line that others wrote into
                self.messages.update(json.loads(line.removeprefix(PREFIX)))
        return True

    def tell(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: wait_for will tell
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()

    def let_go(self) -> None:
        """Tell the doctor to end, by an empty line: the end of a pipe does not reach it through mpirun."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write("\n")
            self._process.stdin.close()

    def end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        end(self._process)

    def why_silent(self) -> str:
        code = self._process.poll()
        said = what_was_said("\n".join(self._errors))
        how = "gave no report in time" if code is None else f"could not be started (exit code {code})"
        return f"{how}{': ' + said if said else ''}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # closed
            for line in self._process.stdout:
                if line.startswith(PREFIX):
                    self._lines.put(line)
        self._process.wait()
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(ValueError):
            for line in self._process.stderr:
                self._errors.append(line)


def examine_hosts(
    hosts: Sequence[Host], chosen: Sequence[str], request: Request
) -> tuple[list[HostReport], list[Finding]]:
    """Every host's report, and findings on the links between them."""
    doctors = []
    for host in hosts:  # this one keeps what its shell has, for that may be what is wrong
        environ = dict(request.environ) if host.is_local else request.child_environ
        doctors.append(HostDoctor(host, _command(host, len(hosts), chosen, request), environ))
    try:
        deadline = time.monotonic() + _START_SECONDS + _CHECKS_SECONDS + 2 * request.seconds
        reports = [_report(doctor, deadline) for doctor in doctors]
        alive = [doctor for doctor in doctors if "report" in doctor.messages]
        between = compare([report for report in reports if "start" not in report.families]) if len(alive) > 1 else []
        if "network" in chosen and len(alive) > 1:
            between += _knock(alive)
    finally:
        for doctor in doctors:
            doctor.let_go()
        for doctor in doctors:
            doctor.end()
    if "all-reduce" in chosen and len(alive) == len(hosts) > 1:
        between += check_across(hosts, request)
    return reports, between


def _command(host: Host, num_hosts: int, chosen: Sequence[str], request: Request) -> list[str]:
    doctor = [sys.executable, "-m", "lightning_ring.cli.main", "doctor", "--part-of", str(num_hosts)]
    doctor += ["-n", str(host.slots), "--timeout", f"{request.seconds:g}", "--only", *chosen]
    if host.is_local:  # without mpirun, so that this host has a report also where mpirun is what is broken
        return doctor
    return [sys.executable, "-m", "lightning_ring.cli.ringrun", "-n", "1", "-H", f"{host.name}:1", "--", *doctor]


def _report(doctor: HostDoctor, deadline: float) -> HostReport:
    if doctor.wait_for("report", deadline):
        return HostReport(doctor.host, HostReport.from_json(doctor.messages["report"]).families)
    advice = (
        f"`ssh {doctor.host} true` must work without a question, {sys.executable} with lightning_ring must be there, "
        f"and firewalls must let mpirun through. `ringrun -n 1 -H {doctor.host}:1 hostname` shows all that is said."
    )
    return HostReport(doctor.host, {"start": [broken("start", doctor.why_silent(), advice)]})


def _knock(doctors: Sequence[HostDoctor]) -> list[Finding]:
    """Every host connects to every other one, at a port that the system gave, as ranks do."""
    doors = {doctor.host: doctor.messages["door"] for doctor in doctors}
    for doctor in doctors:
        doctor.tell({host: door for host, door in doors.items() if host != doctor.host})
    deadline = time.monotonic() + _KNOCK_SECONDS
    findings, reached = [], []
    for doctor in doctors:
        if not doctor.wait_for("reached", deadline):
            found = f"{doctor.host} did not report the hosts that it reaches"
            findings.append(broken("ports", found, "Run the doctor there alone."))
            continue
        for host, attempts in doctor.messages["reached"].items():
            way = next((address for address, error in attempts.items() if not error), None)
            if way is not None:
                reached.append(f"{doctor.host} to {host} at {way}")
            else:
                findings.append(_closed(doctor.host, host, doors[host]["port"], attempts))
    return [*findings, *([ok("ports", ", ".join(reached))] if reached else [])]


def _closed(caller: str, host: str, port: int, attempts: dict[str, str]) -> Finding:
    tried = ", ".join(f"{address}: {error}" for address, error in attempts.items())
    return broken(
        f"port of {host}",
        f"{caller} does not reach port {port} of {host}: {tried or 'it has no address besides 127.0.0.1'}",
        f"Let {host}'s firewall accept TCP from {caller} on the ports that Linux gives out (sysctl "
        "net.ipv4.ip_local_port_range), or name the network that joins the hosts in GLOO_SOCKET_IFNAME.",
    )
