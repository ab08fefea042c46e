"""A job on this host that goes on when ranks die: the supervisor's process is the steward of its membership."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_ring.errors import ConfigurationError
from lightning_ring.job.exit import say
from lightning_ring.launch.mpirun import rank_environment
from lightning_ring.launch.processes import Child, is_dead
from lightning_ring.launch.respawn import RespawnLimits, Respawns
from lightning_ring.launch.supervisor import STOP_SIGNAL, Supervisor, signal_name, stop_grace
from lightning_ring.membership.roster import Roster
from lightning_ring.membership.steward import Steward

LOOK_SECONDS = 0.01  # how often the kernel is asked whether a process is on its way out
_CODES_OF_SIGNALS = range(129, 193)  # a shell's, for a program that a signal ended


@dataclass(frozen=True, slots=True)
class ElasticLimits:
    """How many ranks a job has.

    ``ranks`` start. The job goes on with ``min_ranks`` or more; with fewer it waits ``wait_for_ranks`` seconds for
    others, then ends. It never has more than ``max_ranks``. With ``respawn`` a new process takes the place of a dead
    one.
    """

    ranks: int
    min_ranks: int = 1
    max_ranks: int | None = None
    wait_for_ranks: float = 600.0
    respawn: RespawnLimits | None = None

    def __post_init__(self) -> None:
        most = self.ranks if self.max_ranks is None else self.max_ranks
        if not 1 <= self.min_ranks <= self.ranks <= most:
            raise ConfigurationError(
                f"{self.ranks} ranks, at least {self.min_ranks} and at most {most}: the numbers have to ascend, from 1 "
                "on. Change the number of ranks, --min-ranks or --max-ranks."
            )


@dataclass(slots=True)
class _Process:
    child: Child
    started: float
    dead: bool = False
    outlived: bool = False  # the job went on without it, and ends for another reason, if it ends
    reaped: bool = False  # the kernel has told its exit code, which may take seconds longer

    @property
    def pid(self) -> int:
        assert self.child.process is not None
        return self.child.process.pid

    def poll(self) -> int | None:
        return None if self.child.process is None else self.child.process.poll()


@dataclass(slots=True)
class ElasticJob:
    """Runs ``command`` as the ranks of one job. A rank that is killed leaves; one that fails by itself ends the job.

    The two are told apart by the exit code: a signal's, also as a shell reports it (128 + n), is a death.
    """

    command: Sequence[str]
    limits: ElasticLimits
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    _processes: dict[int, _Process] = field(default_factory=dict, init=False)
    _starving_since: float | None = field(default=None, init=False)
    _shown: int = field(default=-1, init=False)
    _supervisor: Supervisor = field(init=False)
    _steward: Steward = field(init=False)
    _respawns: Respawns | None = field(init=False)

    def run(self, cwd: str | None = None) -> int:
        """Run the job; its exit code is that of `Supervisor.run`, which leaves out the ranks that the job outlived."""
        limits = self.limits
        self._steward = Steward(Roster(limits.min_ranks, limits.max_ranks), self._kill)
        self._respawns = Respawns(limits.respawn) if limits.respawn is not None else None
        children = [self._next_child() for _ in range(limits.ranks)]
        self._supervisor = Supervisor(
            children, grace=stop_grace(self.environ), excuses=self._outlives, wait=self._look_after
        )
        try:
            return self._supervisor.run(cwd)
        finally:
            self._steward.close()

    def pids(self) -> dict[int, int]:
        """The running processes, by number."""
        started = [(number, process) for number, process in list(self._processes.items()) if process.child.process]
        return {number: process.pid for number, process in started if not process.dead}

    def _next_child(self) -> Child:
        number = len(self._processes)
        common = rank_environment(self.limits.ranks, [], self.environ, STOP_SIGNAL)
        # numbers to go on with until the first view tells the rank
        provisional = {"RING_RANK": str(number % self.limits.ranks), "RING_WORLD_SIZE": str(self.limits.ranks)}
        child = Child(f"process {number}", self.command, common | provisional | self._steward.variables(number))
        self._processes[number] = _Process(child, time.monotonic())
        self._steward.expect(number)
        return child

    def _look_after(self) -> None:
        """Serve the ranks, and bury the dead. Called by the supervisor again and again."""
        self._steward.step(LOOK_SECONDS)
        now = time.monotonic()
        for number, process in list(self._processes.items()):
            if not process.dead and process.child.process is not None and is_dead(process.pid):
                process.dead = True
                self._steward.gone(number, "its process is ending")
            if process.dead and not process.reaped and (code := process.poll()) is not None:
                process.reaped = True
                self._replace(number, process, code, now)
        over = self._supervisor.ending or self._steward.ended is not None
        for _ in range(self._respawns.take_due(now) if self._respawns is not None and not over else 0):
            self._supervisor.start(self._next_child())
        self._show_view()
        self._end_if_starved(now)

    def _replace(self, number: int, process: _Process, code: int, now: float) -> None:
        """Say how a process ended that the job outlives, and have another one take its place."""
        over = self._supervisor.ending or self._steward.ended is not None
        if over or number in self._steward.roster.finishers or not _by_signal(code):
            return
        process.outlived = True
        how = f"was killed by signal {-code} ({signal_name(-code)})" if code < 0 else f"ended with exit code {code}"
        replaced = self._respawns is not None and self._respawns.died(now, now - process.started)
        others = (
            f"{len(self._steward.roster.members)} ranks are left" + ", and a new process takes its place" * replaced
        )
        say(f"{process.child.name} (pid {process.pid}) {how}; {others}")

    def _outlives(self, child: Child, code: int) -> bool:
        roster = self._steward.roster
        if any(process.outlived for process in self._processes.values() if process.child is child):
            return True
        if not _by_signal(code) or (self._steward.ended is not None and not roster.finished):
            return False
        others = [process for process in self._processes.values() if process.child is not child]
        return any(other.child.process is not None and other.poll() in (None, 0) for other in others)

    def _kill(self, number: int) -> None:
        process = self._processes[number]
        if process.child.process is not None and process.poll() is None:
            process.child.process.kill()

    def _show_view(self) -> None:
        view = self._steward.roster.view
        if view is not None and view.generation > self._shown:
            self._shown = view.generation
            new = f", {len(view.newcomers)} of them new" if view.newcomers else ""
            say(f"generation {view.generation}: {len(view.members)} ranks{new}, after {view.step or 0} steps")

    def _end_if_starved(self, now: float) -> None:
        if not self._steward.roster.starved:
            self._starving_since = None
            return
        self._starving_since = self._starving_since or now
        roster = self._steward.roster
        unreplaced = any(process.dead and not process.reaped for process in self._processes.values())
        pending = self._respawns.pending if self._respawns is not None else 0
        others_may_come = unreplaced or pending or roster.expected
        if not others_may_come or now - self._starving_since > self.limits.wait_for_ranks:
            left = len(roster.members) or len(roster.newcomers)
            dead = ", ".join(f"{p.child.name} (pid {p.pid})" for p in self._processes.values() if p.dead)
            self._steward.end(
                f"{left} of its ranks are left, and it goes on with {self.limits.min_ranks} or more (--min-ranks). "
                f"Dead: {dead}"
            )


def _by_signal(code: int) -> bool:
    return code < 0 or code in _CODES_OF_SIGNALS
