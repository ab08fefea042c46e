"""A job that goes on when ranks die: the supervisor's process is the steward of its membership."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_ring.elastic.membership import Membership, counted_ranks
from lightning_ring.elastic.steward import SilenceLimits, Steward
from lightning_ring.errors import ConfigurationError
from lightning_ring.host import require_open_files
from lightning_ring.job.exit import say
from lightning_ring.launch.child import Child
from lightning_ring.launch.discovery import Discovery
from lightning_ring.launch.hosts import Host
from lightning_ring.launch.orphan_guard import OrphanGuard
from lightning_ring.launch.process_ends import Deaths, JobProcess, ProcessEnds, RespawnLimits
from lightning_ring.launch.remote import HostLine, RemoteChild, ssh_line
from lightning_ring.launch.slots import Slots
from lightning_ring.launch.supervisor import PEERS_SECONDS, Supervisor, stop_grace


@dataclass(frozen=True, slots=True)
class ElasticLimits:
    """How many ranks a job has.

    ``ranks`` start; with discovery all slots, and at least ``ranks``. The job goes on with
    ``min_ranks`` or more; with fewer it waits ``wait_for_ranks`` seconds, then ends. It never has
    more than ``max_ranks``. With ``respawn`` a new process replaces a dead one. ``silence`` says
    when a silent process counts as dead. A remote agent has ``start_seconds`` to come up.
    """

    ranks: int
    min_ranks: int = 1
    max_ranks: int | None = None
    wait_for_ranks: float = 600.0
    respawn: RespawnLimits | None = None
    silence: SilenceLimits = field(default_factory=SilenceLimits)
    start_seconds: float = 60.0

    def __post_init__(self) -> None:
        most = self.ranks if self.max_ranks is None else self.max_ranks
        if not 1 <= self.min_ranks <= self.ranks <= most:
            raise ConfigurationError(
                f"{self.ranks} ranks, at least {self.min_ranks} and at most {most}: the numbers "
                "have to ascend, from 1 on. Change the number of ranks, --min-ranks or "
                "--max-ranks."
            )


LOOK_SECONDS = 0.01  # how often the kernel is asked whether a process is on its way out
_IDLE_SECONDS = 1.0  # how often it is asked for processor time
_OTHER_FILES = 128
_FAIL_SECONDS = 1.0  # for the exit code of a rank that failed

__all__ = ["ElasticJob", "ElasticLimits", "RespawnLimits"]


@dataclass(slots=True)
class ElasticJob:
    """Runs ``command`` as the ranks of one job. A rank that is killed leaves; one that fails by
    itself ends the job (`ProcessEnds`).

    Without ``hosts`` all ranks are on this host. Each other host gets an agent, started by
    ``line``; this host must not die. ``discovery`` replaces ``hosts``: ranks also start on hosts
    that it lists later, and those on hosts that it drops go on.

    Raises:
        ConfigurationError: Not on Linux.
    """

    command: Sequence[str]
    limits: ElasticLimits
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    hosts: Sequence[Host] = ()
    line: HostLine = ssh_line
    discovery: Discovery | None = None
    _processes: list[JobProcess] = field(default_factory=list, init=False)  # by number
    _by_child: dict[Child | RemoteChild, JobProcess] = field(default_factory=dict, init=False)
    _filled: set[int] = field(default_factory=set, init=False)  # slots that have had a process
    _below_since: float | None = field(default=None, init=False)
    _ended_since: float | None = field(default=None, init=False)
    _next_idle: float = field(default=0.0, init=False)
    _shown: int = field(default=-1, init=False)
    _slots: Slots = field(init=False)
    _deaths: Deaths = field(init=False)
    _ends: ProcessEnds = field(init=False)
    _supervisor: Supervisor = field(init=False)
    _steward: Steward = field(init=False)
    _guard: OrphanGuard = field(init=False)

    def run(self) -> int:
        """Run the job; the exit code is `Supervisor.run`'s, without ranks that the job outlived."""
        if not sys.platform.startswith("linux"):
            raise ConfigurationError(
                f"A job that outlives its ranks runs on Linux only, and this is {sys.platform}: "
                "the kernel has to tell that a rank is dead. Leave --min-ranks out, and use "
                "strategy='ring'."
            )
        limits, hosts, ranks = self.limits, self.hosts, self.limits.ranks
        if self.discovery is not None:
            hosts = self.discovery.wait_for(ranks, limits.wait_for_ranks)
            ranks = min(sum(host.slots for host in hosts), limits.max_ranks or sys.maxsize)
        say(
            f"{counted_ranks(ranks)} of: {shlex.join(self.command)} (goes on with "
            f"{limits.min_ranks} or more)"
        )
        files = max(ranks, limits.max_ranks or 0) + len(hosts) + _OTHER_FILES
        require_open_files(files, f"The process that starts {ranks:,} ranks")
        membership = Membership(limits.min_ranks, limits.max_ranks)
        grows = self.discovery is not None
        self._slots = Slots(
            ranks,
            self.command,
            self.environ,
            hosts,
            self.line,
            grows=grows,
            start_seconds=limits.start_seconds,
        )
        remote = self._slots.remote
        self._steward = Steward(
            membership,
            lambda *removal: self._ends.kill(*removal),
            self._slots.listens[0],
            limits.silence,
            self._idle,
            remote.secret if remote is not None else None,
        )
        if remote is not None:
            remote.steward_port = self._steward.port
        self._deaths = Deaths(limits.respawn)
        self._guard = OrphanGuard(
            f"the process that started the ranks (pid {os.getpid()}) has gone: they end"
        )
        self._ends = ProcessEnds(
            *(self._processes, self._steward, self._deaths, self._slots, self._guard),
            ending=lambda: self._supervisor.ending,
        )
        children = [self._next_child(slot) for slot in range(ranks)]
        self._supervisor = Supervisor(
            children,
            grace=stop_grace(self.environ),
            excuses=lambda child, code: self._ends.is_outlived(self._by_child[child], code),
            wait=self._look_after,
        )
        try:
            code = self._supervisor.run()
        finally:
            for process in self._processes:
                if (
                    process.died is not None
                    and process.number not in self._steward.membership.finishers
                ):
                    process.child.kill_session()
            if self.discovery is not None:
                self.discovery.close()
            if self._slots.remote is not None:
                self._slots.remote.close()
            self._steward.close()
            self._guard.close()
        if self._steward.ended is not None and not self._steward.membership.finished:
            # Also where a signal has ended every process.
            code = code or self._steward.exit_code
        self._say_why(code)
        return code

    def kill(self, signum: int) -> None:
        self._supervisor.kill(signum)

    def pids(self) -> dict[int, int]:
        """The running processes, by number, from any thread."""
        running = [process for process in list(self._processes) if process.child.is_running]
        return {process.number: process.child.pid for process in running if process.died is None}

    def _next_child(self, slot: int) -> Child | RemoteChild:
        number = len(self._processes)
        self._filled.add(slot)
        variables = self._steward.variables(number, self._slots.listens[1])
        child = self._slots.child(slot, number, variables)
        joins = self._steward.membership.view is not None
        process = self._by_child[child] = JobProcess(number, slot, child, joins, time.monotonic())
        self._processes.append(process)
        self._steward.expect(number)
        return child

    # -- called by the supervisor, again and again

    def _look_after(self) -> None:
        self._steward.step(LOOK_SECONDS)
        now = time.monotonic()
        if self._slots.remote is not None:
            self._slots.remote.look(now)
        running = self._unended
        for process in running:
            self._ends.look_at(process, now)
        if now >= self._next_idle:
            self._next_idle = now + _IDLE_SECONDS
            for process in running:
                process.child.idle(now)
        if not self._ends.is_over:
            for slot in self._deaths.take_due(now):
                if self._slots.is_open(slot):
                    self._supervisor.start(self._next_child(slot))
            if self.discovery is not None:
                self._grow(self.discovery, now)
        self._show_view()
        self._end_if_below_min_ranks(now)
        left = self._ends.left
        # Else a plain script, whose ranks do not take part.
        if left and self._steward.pids and not self._ends.is_over:
            self._steward.end(
                f"{left} left with exit code 0 without having finished its training. Leave a fit "
                "by trainer.should_stop on all ranks, not by sys.exit() on one"
            )
        if self._steward.ended is not None:
            self._end(now)

    def _grow(self, discovery: Discovery, now: float) -> None:
        """Start ranks in new slots, or on hosts that came back, up to the most ranks."""
        hosts = discovery.look(now)
        if hosts is not None:
            new = self._slots.list_hosts(hosts)
            self._filled -= {
                slot for slot in new if not any(other.slot == slot for other in self._unended)
            }
        if self._steward.membership.takes_no_more:
            return
        room = (self.limits.max_ranks or sys.maxsize) - len(self._unended) - self._deaths.pending
        for slot in [slot for slot in self._slots.open_slots() if slot not in self._filled][
            : max(0, room)
        ]:
            self._supervisor.start(self._next_child(slot))

    @property
    def _unended(self) -> list[JobProcess]:
        return [process for process in self._processes if not process.ended]

    def _idle(self, number: int) -> float:
        return self._processes[number].child.idle(time.monotonic())

    def _show_view(self) -> None:
        view = self._steward.membership.view
        if view is not None and view.generation > self._shown:
            self._shown = view.generation
            new = f", {len(view.newcomers)} of them new" if view.newcomers else ""
            names = [self._processes[number].name for number in view.members]
            say(
                f"generation {view.generation}: {counted_ranks(len(names))}{new}, after "
                f"{view.step or 0} steps: {', '.join(names[:8])}{', …' * (len(names) > 8)}"
            )

    def _end_if_below_min_ranks(self, now: float) -> None:
        membership = self._steward.membership
        if not membership.below_min_ranks:
            self._below_since = None
            return
        self._below_since = self._below_since or now
        unreplaced = any(
            process.died is not None and not process.ended for process in self._processes
        )
        others_may_come = (
            unreplaced or self._deaths.pending or membership.expected or self.discovery is not None
        )
        if not others_may_come or now - self._below_since > self.limits.wait_for_ranks:
            left = len(membership.members) or len(membership.newcomers)
            waited = f", after {now - self._below_since:.0f} s" if others_may_come else ""
            self._steward.end_with_too_few(
                f"it has {counted_ranks(left)} left{waited}, and goes on with "
                f"{self.limits.min_ranks} or more (--min-ranks). Dead: "
                f"{'; '.join(self._deaths.told)}"
            )
            self._supervisor.fail(stop_grace(self.environ))  # the ranks save a checkpoint

    def _end(self, now: float) -> None:
        self._ended_since = self._ended_since or now
        membership = self._steward.membership
        if not membership.finished:
            if now - self._ended_since > _FAIL_SECONDS and not self._supervisor.ending:
                if self._ends.failed:  # the kernel still frees its memory
                    say(f"{self._ends.failed}; the job ends")
                self._supervisor.fail(PEERS_SECONDS, self._steward.exit_code)
            return
        # What hangs has not heard of the end.
        hangs = now - self._ended_since > PEERS_SECONDS
        for process in self._unended:
            comes_late = hangs or not process.child.is_started
            if comes_late and not membership.was_member(process.number):
                process.child.kill_session()

    def _say_why(self, code: int) -> None:
        for line in self._deaths.given_up.values():
            say(line)
        ended = self._steward.ended
        told = (self._supervisor.cause, self._ends.failed)
        if (
            code
            and ended is not None
            and not self._steward.membership.finished
            and ended not in told
        ):
            say(f"the job has ended: {ended}")
