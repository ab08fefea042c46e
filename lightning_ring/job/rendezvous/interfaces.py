"""Network interfaces of this host, in the order in which other hosts should try them."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
_VIRTUAL = ("lo", "docker", "br-", "virbr", "veth", "cni", "flannel", "lxc", "podman")


def ipv4_addresses() -> list[tuple[str, str]]:
    """``(interface, address)`` of every interface with an IPv4 address, as far as known."""
    found: list[tuple[str, str]] = []
    if not sys.platform.startswith("linux"):
        return found
    import fcntl  # deferred: exists on Unix only

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found.append((name, socket.inet_ntoa(answer[20:24])))
    return found


def ipv6_addresses() -> list[tuple[str, str]]:
    """``(interface, address)`` of every IPv6 address, as `ipv4_addresses`."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:  # no IPv6
        return []
    fields = [line.split() for line in lines]
    return [(each[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(each[0]))) for each in fields]


class _Preferred:
    """The interface that leads to rank 0, known after the rendezvous."""

    name = ""
    offered = False  # the variable is ours


def prefer_interface(address: str) -> None:
    """Have Gloo use the interface that has ``address``, unless the user named one.

    Gloo otherwise resolves the host's name, which on many clusters leads to another interface or
    none.
    """
    _Preferred.name = next(
        (name for name, known in ipv4_addresses() + ipv6_addresses() if known == address), ""
    )
    offer_interface()


def offer_interface() -> None:
    """Set GLOO_SOCKET_IFNAME, which new groups over Gloo read, until `withdraw_interface`."""
    if _Preferred.name and GLOO_VARIABLE not in os.environ:
        os.environ[GLOO_VARIABLE] = _Preferred.name
        _Preferred.offered = True


def withdraw_interface() -> None:
    """Leave the environment as `offer_interface` found it."""
    if _Preferred.offered and os.environ.get(GLOO_VARIABLE) == _Preferred.name:
        del os.environ[GLOO_VARIABLE]
    _Preferred.offered = False


def reachable_candidates(environ: Mapping[str, str]) -> list[str]:
    """This host's addresses that another host may reach, likeliest first.

    Interfaces that the user named for Gloo or NCCL come first, then the addresses of the host's
    name, then the rest, bridges of containers and virtual machines last. Loopback is left out.
    """
    wanted = environ.get(GLOO_VARIABLE) or environ.get("NCCL_SOCKET_IFNAME", "")
    named = tuple(name for name in wanted.split(",") if name and name[0] not in "^=")
    addresses = ipv4_addresses()
    ordered = [address for name, address in addresses if name.startswith(named)]
    with contextlib.suppress(OSError):
        ordered += socket.gethostbyname_ex(socket.gethostname())[2]
    ordered += [address for name, address in addresses if not name.startswith(_VIRTUAL)]
    ordered += [address for _, address in addresses]
    return [address for address in dict.fromkeys(ordered) if not address.startswith("127.")]
