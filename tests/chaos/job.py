"""Runs the job of a planted fit: its launcher, its agents and its ranks, and carries out faults
that ranks ask for.

Launcher and agents are this package's own (`launch.elastic`, `launch.agent`), in processes of their
own, and on hosts of their own (`hosts`). One thing is other than in a job of a user: processes are
forked from the one that calls this, which has imported torch and Lightning, and start no Python. So
a job takes seconds.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

from lightning_ring.elastic.steward import SilenceLimits
from lightning_ring.launch import agent
from lightning_ring.launch.child import Child, _bind_to_parent
from lightning_ring.launch.elastic import ElasticJob, ElasticLimits
from lightning_ring.launch.hosts import Host
from lightning_ring.launch.process_ends import RespawnLimits
from tests.chaos import host as chaos_host
from tests.chaos.processes import Forked, children_of, die_with_parent, field_of
from tests.chaos.rank import live

HANG_SECONDS = 180.0  # in which no process of the job has written anything
SLOW_SECONDS = 10.0  # after which ranks write where they are
LEFT_SECONDS = 20.0  # for what is left when the launcher has ended
SILENT_SECONDS = 3.0  # after which a stopped process is removed
_LOOK_SECONDS = 0.005
_LOGS = (".out", ".steps", ".samples")
# in ssh's place: asks for an agent, hands its own streams to it, and ends with it
_SSH = (
    "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
    "socket.send_fds(s, [sys.argv[2].encode()], [0, 1, 2]); sys.exit(int(s.recv(16) or b'1'))"
)


class Job:
    """Forks the processes of ``plan``, whose ranks call ``train`` with their numbers. They write to
    ``folder``.

    Attributes:
        code: The launcher's exit code, -n for signal n.
        wrong: What went wrong, in words.
        lost_hosts: That a fault has cut off or ended.
        steward_died: Whether a fault has ended the launcher.
        standstill: The longest time in which no process has written anything, in seconds.
    """

    def __init__(self, plan, folder, train, hosts=None):
        self.plan, self.folder, self.train = plan, folder, train
        self.code = None
        self.wrong = []
        self.lost_hosts = set()
        self.steward_died = False
        self.standstill = 0.0
        self._hosts = hosts
        self._agents = {}  # by pid
        self._launcher = 0
        self._later = []
        self._unreachable = set()  # hosts, for good
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "ssh"))
        self._listener.listen()
        self._listener.setblocking(False)

    def run(self):
        """Returns once none of the job's processes is left."""
        chaos_host.adopt_orphans()
        (self.folder / "tmp").mkdir()
        self._launcher = self._fork(self._launch)
        try:
            self._look_after()
        finally:
            self._kill_all()
            self._listener.close()

    def _look_after(self):
        came_further = time.monotonic()
        ended = None
        seen = -1
        while self._reap():
            now = time.monotonic()
            self._start_agents()
            self._carry_out()
            for due in [due for due in self._later if due[0] <= now]:
                self._later.remove(due)
                due[1]()
            written = sum(
                log.stat().st_size for log in self.folder.iterdir() if log.suffix in _LOGS
            )
            if (standstill := now - came_further) > SLOW_SECONDS > self.standstill:
                self._ask_where_ranks_are()
            self.standstill = max(self.standstill, standstill)
            came_further, seen = (now, written) if written != seen else (came_further, seen)
            ended = ended or (now if self.code is not None else None)
            if ended is not None and now - ended > LEFT_SECONDS:
                self._give_up(f"left behind {LEFT_SECONDS:.0f} s after the launcher's end")
            elif now - came_further > HANG_SECONDS:
                self._give_up(f"hang: in {HANG_SECONDS:.0f} s nobody came further")
            time.sleep(_LOOK_SECONDS)

    # -- processes

    def _fork(self, run):
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.setsid()
            die_with_parent()
            code = run() or 0
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            os._exit(code)

    def _launch(self):
        out = os.open(self.folder / "launcher.out", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for number in (1, 2):
            os.dup2(out, number)
        tempfile.tempdir = str(self.folder / "tmp")
        plan, hosts = self.plan, self._hosts
        limits = ElasticLimits(
            plan.ranks,
            respawn=RespawnLimits(plan.respawns, delay=0.1) if plan.respawns else None,
            silence=SilenceLimits(answer=SILENT_SECONDS),
        )
        Child.start = lambda child, cwd=None, **names: self._start_child(child, names)
        listed = []
        if hosts is not None:
            chaos_host.enter(hosts.names[0])
            listed = [Host(name, plan.ranks // plan.hosts) for name in hosts.names]
        ssh = [sys.executable, "-I", "-S", "-c", _SSH, str(self.folder / "ssh")]
        job = ElasticJob(
            ["a rank"], limits, dict(os.environ), listed, lambda host, _: [*ssh, host.name]
        )
        return job.run()

    def _start_child(self, child, variables):
        """`Child.start`, which forks in the place of starting a program."""
        bind, environ = _bind_to_parent(child.dies_with_parent), {**child.environ, **variables}
        number = int(environ["RING_MEMBER"])
        pid = os.fork()
        if pid == 0:
            os.setsid()
            bind()
            # as if a program was started; objects that hold them live to the end of this one
            os.closerange(3, 1024)
            os.environ.clear()
            os.environ.update(environ)
            live(self.folder, number, self.train)
        child.process = Forked(pid, self.folder / f"{number}.code")

    def _start_agents(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except BlockingIOError:
                return
            client.setblocking(True)
            name, streams, _, _ = socket.recv_fds(client, 256, 3)
            if name.decode() in self._unreachable:
                client.sendall(b"255")  # ssh's: no route to host
                client.close()
                for stream in streams:
                    os.close(stream)
                continue

            def run(host: str = name.decode(), streams=streams):
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                os.closerange(3, 1024)
                chaos_host.enter(host)
                sys.stdin = open(0)  # noqa: SIM115
                Child.start = lambda child, cwd=None, **names: self._start_child(child, names)
                return agent.main()

            self._agents[self._fork(run)] = name.decode(), client
            for stream in streams:
                os.close(stream)

    def _reap(self):
        """Whether any process is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if not pid:
                return True
            code = os.waitstatus_to_exitcode(status)
            if pid == self._launcher:
                self.code, self._launcher = code, 0
            elif pid in self._agents:
                _, client = self._agents.pop(pid)
                with contextlib.suppress(OSError):  # it was killed
                    client.sendall(f"{code % 256}".encode())
                client.close()

    def _give_up(self, why):
        left = children_of(os.getpid())
        self.wrong.append(f"{why}: {', '.join(f'{pid} ({field_of(pid, 0)})' for pid in left)}")
        self._ask_where_ranks_are()
        time.sleep(1.0)
        self._kill_all()

    def _ask_where_ranks_are(self):
        """They answer in ``FOLDER/NUMBER.stacks``."""
        parents = {os.getpid(), self._launcher, *self._agents}
        for log in self.folder.glob("*.pid"):
            pid = int(log.read_text() or -1)
            if field_of(pid, 1) in map(str, parents):
                os.kill(pid, signal.SIGUSR1)

    def _kill_all(self):
        while self._reap():
            for pid in children_of(os.getpid()):
                os.kill(pid, signal.SIGKILL)
            time.sleep(_LOOK_SECONDS)

    # -- faults

    def _carry_out(self):
        for ask in self.folder.glob("*.ask"):
            asked = json.loads(ask.read_text())
            ask.unlink()
            self._do(asked["kind"], asked["host"], asked["seconds"])
            ask.with_suffix(".done").touch()

    def _do(self, kind, host, seconds):
        hosts = self._hosts
        if kind in ("steward", "steward_stop"):
            self._end_or_stop(self._launcher, seconds)
            self.steward_died |= kind == "steward"
            self.lost_hosts |= set(hosts.names[1:]) if hosts is not None else set()
            return
        steward_is_here = host == hosts.names[0]
        self.lost_hosts |= set(hosts.names[1:]) if steward_is_here else {host}
        if kind in ("agent", "agent_stop"):
            for pid in [pid for pid, (where, _) in self._agents.items() if where == host]:
                self._end_or_stop(pid, seconds)
            return
        hosts.cut(host)
        if seconds:
            self._later.append((time.monotonic() + seconds, lambda: hosts.mend(host)))
        else:
            self._unreachable.add(host)
        if kind == "host":
            self.steward_died |= steward_is_here
            listed = subprocess.run(
                ["ip", "netns", "pids", host], capture_output=True, text=True, timeout=20
            ).stdout
            for pid in map(int, listed.split()):
                os.kill(pid, signal.SIGKILL)

    def _end_or_stop(self, pid, seconds):
        """Kill a process of this job's, or stop it for ``seconds``."""

        def go_on():
            if pid == self._launcher or pid in self._agents:
                os.kill(pid, signal.SIGCONT)

        os.kill(pid, signal.SIGSTOP if seconds else signal.SIGKILL)
        if seconds:
            self._later.append((time.monotonic() + seconds, go_on))
