"""A real Slurm on this machine: a controller and several nodes, all on loopback, in one folder.

Needs root, and the daemons of Slurm and MUNGE (Debian: slurmctld, slurmd, slurm-client and munge;
no service of theirs has to run).
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lightning_ring.job.rendezvous.greeting import reserve_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel")
PROGRAMS += ("sinfo", "squeue")
_START_SECONDS = 60.0
_END_SECONDS = 15.0
_SEARCHED = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])

_CONFIGURATION = """\
ClusterName=ring{port}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
KillWait=30
InactiveLimit=0
MessageTimeout=30
SchedulerParameters=batch_sched_delay=0,sched_interval=2,defer_batch=no
ReturnToService=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=4 State=UNKNOWN
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.2 Port={second} CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP
"""


def reason_not_to_start():
    """Why no Slurm can be started here, or `None`."""
    if missing := [name for name in PROGRAMS if shutil.which(name, path=_SEARCHED) is None]:
        return f"Slurm is not installed: no {', '.join(missing)}"
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    return None


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Slurm that runs; ``environ`` leads its commands to it."""

    folder: Path
    environ: dict[str, str]


@contextmanager
def slurm_cluster(folder):
    """Start Slurm with keys, state, spool and log files in ``folder``; at the end cancel all jobs
    and end all daemons.

    Args:
        folder: Empty or new; its path has to be short, it holds a Unix socket.

    Raises:
        RuntimeError: A daemon did not start; the message holds the end of its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    reserved = [reserve_port() for _ in range(3)]
    port, first, second = (one.getsockname()[1] for one in reserved)
    # names that lead to this machine wherever they are looked up
    nodes = ["127.0.0.1", "127.0.0.2"]
    configuration = folder / "slurm.conf"
    values = {"host": socket.gethostname(), "port": port, "first": first, "second": second}
    configuration.write_text(_CONFIGURATION.format(folder=folder, **values))
    (folder / "state").mkdir()
    for node in nodes:
        (folder / f"spool-{node}").mkdir()
    cluster = Cluster(folder, {"SLURM_CONF": str(configuration)})
    with ExitStack() as stack:
        for one in reserved:
            stack.enter_context(one)
        _start(stack, folder, "munged", _munged(folder))
        _wait_for(lambda: (folder / "munge.socket").exists(), folder, "munged")
        _start(stack, folder, "slurmctld", ["slurmctld", "-D", "-f", str(configuration)])
        for node in nodes:
            command = ["slurmd", "-D", "-f", str(configuration), "-N", node]
            _start(stack, folder, f"slurmd-{node}", command)
        stack.callback(_cancel_all, cluster)
        daemons = ("slurmctld", *(f"slurmd-{node}" for node in nodes))
        _wait_for(lambda: _idle_nodes(cluster) == len(nodes), folder, *daemons)
        yield cluster


def _munged(folder):
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    return ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files]


def _start(stack, folder, name, command):
    """Start a daemon; ``stack`` ends it, and what it started that is left."""
    program = shutil.which(command[0], path=_SEARCHED)
    assert program is not None, command[0]
    with (folder / f"{name}.out").open("wb") as output:
        process = subprocess.Popen(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    stack.callback(_end, process)


def _end(process):
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=_END_SECONDS)


def _cancel_all(cluster):
    """Cancel what still runs, and wait for its end: a step's daemon outlives the node's."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        slurm(cluster, "scancel", "--state=PENDING,RUNNING,SUSPENDED", "--user=root")
        deadline = time.monotonic() + _END_SECONDS
        while slurm(cluster, "squeue", "--noheader") and time.monotonic() < deadline:
            time.sleep(0.1)


def slurm(cluster, *command):
    """What one of Slurm's commands prints, errors too."""
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environ = os.environ | cluster.environ
    done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, timeout=60, **output)
    return done.stdout


def _idle_nodes(cluster):
    with contextlib.suppress(subprocess.TimeoutExpired):
        return slurm(cluster, "sinfo", "--noheader", "-N", "-o", "%t").split().count("idle")
    return 0


def _wait_for(condition, folder, *daemons):
    deadline = time.monotonic() + _START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            logs = [file for name in daemons for file in folder.glob(f"{name}.[ol]*")]
            ends = [f"{file.name}:\n{file.read_text()[-2000:]}" for file in logs]
            told = f"not up within {_START_SECONDS:.0f} s: {', '.join(daemons)}"
            raise RuntimeError("\n".join([told, *ends]))
        time.sleep(0.05)
