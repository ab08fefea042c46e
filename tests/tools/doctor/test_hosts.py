"""The doctor on several hosts: what it compares, and what lies between them."""

import socket
import subprocess

import pytest

from tests import forked
from tests.hosts import INTERFACE
from tests.processes import mpirun_path
from tests.tools.doctor.planting import (
    change_metadata,
    doctor,
    packages_of,
    program,
    with_mounts,
)

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(mpirun_path() is None, reason="no mpirun beside this Python"),
]

HERE = socket.gethostname()


def agent(folder, script):
    """Settings by which mpirun starts other hosts with ``script`` in ssh's place: $host, and the
    command as "$*".
    """
    start = 'while [ "${1#-}" != "$1" ]; do shift; done\nhost=$1; shift\n'
    return {"PRTE_MCA_plm_ssh_agent": str(program(folder, "agent", start + script))}


def test_hosts_with_different_versions(environment, tmp_path):
    """The other host is this machine, but for the folder of packages: another release of
    Lightning is mounted there.
    """
    link = next(packages_of(environment).glob("lightning-*.dist-info"))
    real = link.resolve()
    changed = change_metadata(environment, "lightning", "^Version: .*", "Version: 2.5.0")
    within = with_mounts(f"mount --bind '{changed}' '{real}'")
    if within is None:
        pytest.skip("needs root, or user namespaces, to give another host other files")
    mounts = " ".join(within[: within.index("sh")])
    env = agent(
        tmp_path, f"exec {mounts} sh -c \"mount --bind '{changed}' '{real}'; hostname $host; $*\""
    )
    report = doctor("-H", f"{HERE},elsewhere", only=["versions", "mpi"], **env)
    assert [host["host"] for host in report.read["hosts"]] == [HERE, "elsewhere"]
    differs = report.between("lightning differs")
    assert differs["state"] == "broken"
    assert differs["found"].endswith(f" on {HERE}; 2.5.0 on elsewhere")
    assert "every host" in differs["advice"]
    assert "torch" in report.between("same on all hosts")["found"]


def test_host_that_cannot_be_reached(tmp_path):
    env = agent(
        tmp_path, 'echo "ssh: connect to host $host port 22: Connection refused" >&2; exit 255'
    )
    report = doctor("-H", f"{HERE},elsewhere", only=["versions"], **env)
    start = report.find("start", host=1)
    assert start is not None, report.read
    assert start["state"] == "broken"
    assert "ssh: connect to host elsewhere port 22: Connection refused" in start["found"]
    assert "ssh elsewhere true" in start["advice"]
    assert report.find("torch", host=0) is not None, "this host has its report all the same"


def close_ports(host):
    """A firewall that lets through what mpirun asks for: packets between ports that the system
    gave are lost.
    """
    given = ["ipproto", "tcp", "sport", "30000-65000", "dport", "30000-65000"]
    for rule in (
        # what is meant for this host is decided first, so that goes second
        ["add", "pref", "100", "lookup", "local"],
        ["del", "pref", "0"],
        ["add", "pref", "50", "iif", INTERFACE, *given, "blackhole"],
    ):
        done = subprocess.run(
            ["ip", "-n", host, "rule", *rule], capture_output=True, text=True, timeout=60
        )
        if done.returncode:
            pytest.skip(f"this kernel drops no packets for us: {done.stderr.strip()}")


@pytest.mark.netns
def test_closed_ports_between_hosts(hosts, tmp_path):
    first, second = hosts.names
    close_ports(second)
    env = agent(tmp_path, 'exec ip netns exec "$host" unshare --uts sh -c "hostname $host; $*"')
    env |= {
        "PRTE_MCA_oob_tcp_dynamic_ipv4_ports": "20000-20100",
        "PRTE_MCA_prte_keep_fqdn_hostnames": "1",
        "GLOO_SOCKET_IFNAME": INTERFACE,
        **forked.ranks(),
    }
    within = hosts.on(first)
    report = doctor("-H", f"{first},{second}", only=["all-reduce"], within=within, **env)
    closed = report.between("all-reduce")
    assert closed["state"] == "broken"
    said = f"reachable from every rank; tried {hosts.address(first)}. Open the hosts' firewalls"
    assert said in closed["found"]
