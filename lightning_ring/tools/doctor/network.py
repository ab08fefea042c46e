"""Can ranks find this host, listen on it and be reached."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from lightning_ring.job.rendezvous.interfaces import ipv4_addresses, reachable_candidates
from lightning_ring.tools.doctor.asking import DoctorRequest
from lightning_ring.tools.doctor.findings import Finding, broken, ok, warning

_SECONDS = 3.0
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def check(request: DoctorRequest) -> list[Finding]:
    return [
        _hostname(request.num_hosts > 1),
        _listening(request),
        *_named_interfaces(request.environ),
        *_master(request.environ),
    ]


def _hostname(many: bool) -> Finding:
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        advice = (
            f"Add a line to /etc/hosts, such as `{(_own_addresses() or ['127.0.1.1'])[0]} {name}`."
        )
        return broken("hostname", f"{name} resolves to nothing: {error.strerror}", advice)
    found = f"{name} resolves to {', '.join(addresses)}"
    if many and all(address.startswith(("127.", "::1")) for address in addresses):
        advice = (
            "Other hosts cannot use that, and programs that hand it out fail. lightning_ring "
            f"looks at the interfaces instead; for the others, give {name} its real address in "
            "/etc/hosts."
        )
        return warning("hostname", found, advice)
    return ok("hostname", found)


def _own_addresses() -> list[str]:
    return [address for _, address in ipv4_addresses() if not address.startswith("127.")]


def _connect(address: str, port: int) -> str:
    """The error; empty if there is none."""
    try:
        socket.create_connection((address, port), timeout=_SECONDS).close()
    except TimeoutError:
        return f"no answer within {_SECONDS:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _listening(request: DoctorRequest) -> Finding:
    """A rank listens, and is reached, at each address of this host."""
    name = "listening"
    try:
        with socket.create_server(("", 0)) as door:
            addresses = ["127.0.0.1", *reachable_candidates(request.environ)]
            port = door.getsockname()[1]
            failed = {address: error for address in addresses if (error := _connect(address, port))}
    except OSError as error:
        return broken(
            name,
            f"no port can be opened: {error.strerror}",
            "A sandbox or a limit forbids it (ulimit -n).",
        )
    if failed:
        found = ", ".join(f"{address}: {error}" for address, error in failed.items())
        if len(failed) < len(addresses) and "127.0.0.1" not in failed and request.num_hosts == 1:
            return warning(
                name,
                found,
                "A firewall is in between; ranks of this host alone meet over 127.0.0.1.",
            )
        return broken(
            name,
            found,
            "A firewall drops what this host sends to itself: allow TCP from its own addresses.",
        )
    if request.num_hosts > 1 and len(addresses) == 1:
        return broken(
            name,
            "this host has no address but 127.0.0.1",
            "Connect it to a network that the others reach.",
        )
    return ok(name, f"reached at {', '.join(addresses)}")


def _named_interfaces(environ: Mapping[str, str]) -> list[Finding]:
    there = [name for _, name in socket.if_nameindex()]
    findings = []
    for variable in _INTERFACES:
        named = [
            name for name in environ.get(variable, "").split(",") if name and name[0] not in "^="
        ]
        missing = [
            name for name in named if not any(interface.startswith(name) for interface in there)
        ]
        if missing:
            advice = f"There are: {', '.join(there)}. Name one of them, or unset {variable}."
            findings.append(broken(variable, f"{', '.join(missing)}: no such interface", advice))
        elif named:
            findings.append(ok(variable, ", ".join(named)))
    return findings


def _master(environ: Mapping[str, str]) -> list[Finding]:
    """The rendezvous of torch.distributed, if the environment sets it."""
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if address is None and port is None:
        return []
    name, found = "MASTER_ADDR", f"{address or 'not set'}, port {port or 'not set'}"
    try:
        resolved = socket.gethostbyname(address or "localhost")
    except OSError as error:
        advice = (
            "Unset it (mpirun and ringrun need none), or name rank 0's host as this one knows it."
        )
        return [broken(name, f"{found}: {error.strerror}", advice)]
    if port is not None and not (port.isdigit() and 0 < int(port) < 65536):
        return [
            broken(
                "MASTER_PORT",
                f"{port!r} is no port",
                "Unset it, or set a number from 1024 to 65535.",
            )
        ]
    if port is None or resolved not in ("127.0.0.1", *_own_addresses()):
        return [ok(name, found)]
    try:
        socket.create_server(("", int(port))).close()
    except OSError as error:
        who = (
            "`ss -ltnp` shows who has it. Unset MASTER_PORT (mpirun and ringrun need none), or "
            "choose a free one."
        )
        return [broken("MASTER_PORT", f"rank 0 cannot listen on {port}: {error.strerror}", who)]
    return [ok(name, f"{found}, which is free")]
