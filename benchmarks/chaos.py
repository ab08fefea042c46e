"""Planted faults in elastic fits: hangs, lost steps, ranks that differ, samples read twice, and what is left behind.

    python benchmarks/chaos.py --faults 100 --seed 0 --json

Each job is a Trainer's fit of 2 to 6 ranks on this host, with a batch norm, an optimizer with state, a schedule,
validation, checkpoints and sometimes accumulated batches or sharded optimizers, over shared memory, Gloo, or both
between pretended nodes. A seed decides about everything: who dies at which step, where in it, how, whether another
process replaces it. Ranks are forked from this process, which has imported torch and Lightning, so that a job takes
seconds. The steward is the real one; that a launcher notices deaths is tested elsewhere. With sharded optimizers a job
may end with the word that both ranks which held a shard have died.

The exit code is 1 if any job went wrong; its seed is printed, and ``--seed SEED --faults 1`` runs it again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.chaos_rank import PLACES, SHARDED_PLACES, STEPS, Fault, fit, live
from lightning_ring.launch.processes import is_dead
from lightning_ring.membership.membership import Membership
from lightning_ring.membership.silence import SilenceLimits
from lightning_ring.membership.steward import Steward

KINDS = ("kill", "kill", "kill", "exit", "stop")
LIMIT_SECONDS = 180.0  # for a job that takes a few, on a machine that is free
SILENT_SECONDS = 1.5  # after which a stopped process is removed


@dataclass(frozen=True, slots=True)
class Plan:
    """A job: its ranks, its faults, the processes that replace the dead."""

    seed: int
    ranks: int
    backend: str
    accumulate: int
    replacements: int
    faults: tuple[Fault, ...]
    nodes: int = 1  # that ranks take by turns
    sharded: bool = False  # optimizers


def draw(seed: int) -> Plan:
    draws = random.Random(seed)
    ranks, nodes = draws.choice([(2, 1), (3, 1), (4, 1), (5, 1), (4, 2), (6, 2), (6, 3)])
    replacements = draws.choice([0, 1, 2])
    num_faults = draws.randint(1, ranks - 1)
    faults: list[Fault] = []
    sharded = draws.random() < 0.4
    places = (*PLACES, *SHARDED_PLACES * 3) if sharded else PLACES
    for number in draws.sample(range(ranks), num_faults):  # rank 0 as often as others
        together = faults and draws.random() < 0.3
        step = faults[-1].step if together else draws.randrange(1, STEPS)
        faults.append(Fault(number, step, draws.choice(places), draws.choice(KINDS)))
    accumulate = draws.choice([1, 1, 2])
    backend = draws.choice(["auto", "gloo"]) if nodes == 1 else "auto"
    return Plan(seed, ranks, backend, accumulate, replacements, tuple(faults), nodes, sharded)


@dataclass(slots=True)
class Result:
    """What became of a job. ``faults`` were carried out; ``wrong`` says what is wrong, in words."""

    plan: Plan
    faults: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    joined: int = 0
    lost: bool = False  # both ranks that held a shard died at once, and the job said so
    seconds: float = 0.0


class Job:
    """Forks the ranks of a plan, which call ``train`` with their numbers, and is their steward."""

    def __init__(self, plan: Plan, folder: Path, train: Callable[[int], None]) -> None:
        self.plan = plan
        self.folder = folder
        self.train = train
        self.pids: dict[int, int] = {}
        self.dead: set[int] = set()
        self.codes: dict[int, int] = {}
        self.replacements = plan.replacements
        silence = SilenceLimits(answer=SILENT_SECONDS)
        self.steward = Steward(Membership(), self.kill, silence=silence, idle=self.idle)

    def start(self) -> None:
        number = len(self.pids)
        provisional = {"RING_RANK": str(number % self.plan.ranks), "RING_WORLD_SIZE": str(self.plan.ranks)}
        provisional["RING_NODE_RANK"] = str(number % self.plan.nodes)
        self.steward.expect(number)
        pid = os.fork()
        if pid == 0:
            os.environ |= provisional | self.steward.variables(number)
            self.steward.close()
            live(self.folder, number, self.train)
        self.pids[number] = pid

    def kill(self, number: int, why: str, seconds: float) -> None:
        if number not in self.codes:
            os.kill(self.pids[number], signal.SIGKILL)

    def idle(self, number: int) -> float:
        """A process that was stopped counts as idle, and one that only waits for a processor does not."""
        try:
            state = Path(f"/proc/{self.pids[number]}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return 0.0
        return SILENT_SECONDS * 2 if state == "T" else 0.0

    def run(self) -> bool:
        """Whether all processes ended in time. Whatever still runs is killed."""
        for _ in range(self.plan.ranks):
            self.start()
        until = time.monotonic() + LIMIT_SECONDS
        while len(self.codes) < len(self.pids) and time.monotonic() < until:
            self.steward.step(0.005)
            for number, pid in list(self.pids.items()):
                if number not in self.dead and is_dead(pid):
                    self.dead.add(number)
                    self.steward.gone(number, "its process is ending")
                if number in self.dead and number not in self.codes:
                    self.reap(number, pid)
        left = [pid for number, pid in self.pids.items() if number not in self.codes]
        for pid in left:
            os.kill(pid, signal.SIGUSR2)
        time.sleep(1.0 if left else 0.0)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.steward.close()
        return not left

    def reap(self, number: int, pid: int) -> None:
        done, status = os.waitpid(pid, os.WNOHANG)
        if not done:
            return
        self.codes[number] = code = os.waitstatus_to_exitcode(status)
        if code and self.replacements and self.steward.ended is None and not self.steward.membership.finishers:
            self.replacements -= 1
            self.start()


def run_job(plan: Plan) -> Result:
    result, began = Result(plan), time.monotonic()
    shared = segments()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        job = Job(plan, folder, lambda number: fit(folder, number, plan))
        if not job.run():
            result.wrong.append(f"hang: it did not end within {LIMIT_SECONDS:.0f} s")
        result.faults = [line for log in folder.glob("*.fault") for line in log.read_text().splitlines()]
        faulty = {int(fault.split()[0]) for fault in result.faults}
        failed = {number: code for number, code in job.codes.items() if code and number not in faulty}
        said = any("optimizer's state are lost" in path.read_text() for path in folder.glob("*.out"))
        result.lost = said and plan.sharded and len(result.faults) > 1
        if failed and not result.lost:
            result.wrong.append(f"processes {failed} failed by themselves: {last_lines(folder, failed)}")
        ended = [number for number in job.codes if job.codes[number] == 0]
        result.joined = len([number for number in ended if number >= plan.ranks])
        if not ended and not result.lost:
            result.wrong.append("nobody finished")
        result.wrong += check_steps(folder) + (check_samples(folder, plan) if not result.lost else [])
        if new := segments() - shared:
            result.wrong.append(f"left in /dev/shm: {sorted(new)}")
        if result.wrong:
            shutil.copytree(folder, Path(tempfile.gettempdir()) / f"chaos-failed-{plan.seed}", dirs_exist_ok=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result.seconds = time.monotonic() - began
    return result


def check_steps(folder: Path) -> list[str]:
    """Every step that some rank has finished is in one history, whose weights are the same on all ranks."""
    digests: dict[int, str] = {}
    for log in folder.glob("*.steps"):
        for line in log.read_text().splitlines():
            with contextlib.suppress(ValueError):  # the last line of a killed process
                step, digest = json.loads(line)
                if digests.setdefault(step, digest) != digest:
                    return [f"ranks differ after step {step}"]
    steps = sorted(digests)
    return [] if steps == list(range(1, len(steps) + 1)) else [f"steps are missing: {steps}"]


def check_samples(folder: Path, plan: Plan) -> list[str]:
    """No sample of an epoch is trained on twice, and none is left out but for a remainder below one step."""
    reads: dict[int, dict[int, dict[int, list[tuple[int, list[int]]]]]] = {}  # by step, attempt and process
    for log in folder.glob("*.samples"):
        for line in log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                epoch, step, attempt, samples = json.loads(line)
                by_process = reads.setdefault(step, {}).setdefault(attempt, {})
                by_process.setdefault(int(log.stem), []).append((epoch, samples))
    epochs: dict[int, Counter[int]] = {}
    for by_attempt in reads.values():
        for batches in by_attempt[max(by_attempt)].values():
            for epoch, samples in batches:
                epochs.setdefault(epoch, Counter()).update(samples)
    wrong = []
    for epoch, counts in epochs.items():
        if twice := [sample for sample, count in counts.items() if count > 1]:
            wrong.append(f"epoch {epoch} trained on {len(twice)} samples twice")
        if (skipped := 96 - len(counts)) >= (plan.ranks + plan.replacements) * 4 * plan.accumulate:
            wrong.append(f"epoch {epoch} left out {skipped} samples")
    return wrong


def last_lines(folder: Path, failed: dict[int, int]) -> str:
    texts = [(folder / f"{number}.out").read_text().strip().splitlines()[-1:] for number in failed]
    return "; ".join(line for text in texts for line in text)[:500]


def segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("lightning")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20, help="jobs run until so many faults were carried out")
    parser.add_argument("--seed", type=int, default=0, help="of the first job; the next ones have the next numbers")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results: list[Result] = []
    seed = options.seed
    while sum(len(result.faults) for result in results) < options.faults:
        result = run_job(draw(seed))
        results.append(result)
        seed += 1
        if not options.json or result.wrong:
            print(f"seed {result.plan.seed}: {result.faults or 'no fault'}, {result.seconds:.1f} s", file=sys.stderr)
            for line in result.wrong:
                print(f"  WRONG: {line}", file=sys.stderr)
    kinds = Counter(" ".join(fault.split()[2:]) for result in results for fault in result.faults)
    summary = {
        "seeds": [options.seed, seed - 1],
        "jobs": len(results),
        "faults": sum(kinds.values()),
        "joined": sum(result.joined for result in results),
        "lost_shards": sum(result.lost for result in results),
        "wrong": {result.plan.seed: result.wrong for result in results if result.wrong},
        "by_place_and_kind": dict(sorted(kinds.items())),
        "plans_of_failures": [asdict(result.plan) for result in results if result.wrong],
    }
    print(json.dumps(summary, indent=None if options.json else 2))
    return 1 if summary["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
