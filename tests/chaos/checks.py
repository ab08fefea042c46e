"""What must be true of a planted job when it is over."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.chaos.job import Job
from tests.chaos.plan import BATCH, EPOCHS, SAMPLES, Plan

_LOST_SHARDS = "optimizer's state are lost"
# What a job says that may end for another reason than the end of its training
_REASONS = {
    "exit": ("ended with exit code 9; the job ends",),
    "disk": ("No space left",),
    "shm": ("No space left", "shared memory", "us error", "nexpected pos"),
}


class Outcome:
    """How ``job`` ended.

    Attributes:
        faults: That were carried out: number, host, place, kind.
        finished: Whether the training was finished.
        lost: Whether both ranks that held a shard have died, and the job said so.
        joined: Number of processes that came later and trained.
        new_starts: How often the job began again from a checkpoint.
        wrong: What is wrong, in words.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._folder, self._plan = job, job.folder, job.plan
        self._lives = Lives.read(job.folder)
        self.new_starts = len(self._lives.first_numbers)
        self.faults = [
            line.split()
            for log in job.folder.glob("*.fault")
            for line in log.read_text().splitlines()
        ]
        self._said = "".join(path.read_text(errors="replace") for path in job.folder.glob("*.out"))
        self._codes = {int(path.stem): int(path.read_text()) for path in job.folder.glob("*.code")}
        self.finished = job.code == 0
        self.lost = _LOST_SHARDS in self._said and job.plan.sharded and bool(self.faults)
        self.joined = len(
            [path for path in job.folder.glob("*.steps") if int(path.stem) >= job.plan.ranks]
        )
        self.wrong = [
            *job.wrong,
            *self._check_end(),
            *check_steps(job.folder),
            *self._check_checkpoints(),
        ]
        if self.finished:
            self.wrong += check_samples(job.folder, job.plan)
        self.wrong += [
            f"left behind: {path}"
            for path in job.folder.glob("tmp/lightning*")
            if not job.steward_died
        ]

    def _check_end(self) -> list[str]:
        kinds = {kind for _, _, _, kind in self.faults}
        if self._job.steward_died:
            told = self._said.count("has gone: they end")
            silent = "host" in kinds  # the power of its own host failed
            return [] if told == 1 or silent else [f"the steward's death was told {told} times"]
        if self.finished:
            failed = self._unexpected(lambda code: code != 0, self._lives.latest)
            failed |= self._unexpected(lambda code: code < 0)
            wrong = (
                [f"processes {failed} failed by themselves: {self._last_lines()}"] if failed else []
            )
            return wrong if 0 in self._codes.values() else [*wrong, "nobody finished"]
        if self.lost or any(
            reason in self._said for kind in kinds for reason in _REASONS.get(kind, ())
        ):
            killed = self._unexpected(lambda code: code < 0)
            return (
                [f"processes {killed} did not end with the job, and were killed"] if killed else []
            )
        return [f"the job ended with code {self._job.code}: {self._last_lines()}"]

    def _unexpected(self, is_wrong: Callable[[int], bool], first: int = 0) -> dict[int, int]:
        """The exit codes of ranks without a fault, on hosts without one, from number ``first``
        on.
        """
        excused = {int(number) for number, _, _, _ in self.faults}
        codes = {} if self._job.lost_hosts else self._codes
        return {
            number: code
            for number, code in codes.items()
            if is_wrong(code) and number not in excused and number >= first
        }

    def _check_checkpoints(self) -> list[str]:
        errors = []
        for path in self._folder.glob("disk/checkpoints/*.ckpt"):
            try:
                torch.load(path, weights_only=False)
            except Exception as error:
                errors.append(
                    f"{path.name} cannot be loaded: {type(error).__name__}: {error}"[:300]
                )
        return errors

    def _last_lines(self) -> str:
        return " | ".join(
            (self._folder / "launcher.out").read_text(errors="replace").strip().splitlines()[-2:]
        )[:800]


@dataclass(frozen=True, slots=True)
class Lives:
    """A job that has lost its state begins again from a checkpoint, with processes of higher
    numbers.

    ``first_numbers``: of the processes of the second life, the third, and so on.
    """

    first_numbers: tuple[int, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Lives:
        log = folder / "lives"
        return cls(tuple(map(int, log.read_text().split())) if log.exists() else ())

    @property
    def latest(self) -> int:
        """The first number of the latest life."""
        return self.first_numbers[-1] if self.first_numbers else 0

    def of(self, number: int) -> int:
        """The life of process ``number``, from 0 on."""
        return sum(first <= number for first in self.first_numbers)


def check_steps(folder: Path) -> list[str]:
    """Every step that some rank has finished is in one history, whose weights are the same on all
    ranks.

    Of a life before the latest, steps behind its last checkpoint are lost.
    """
    lives = Lives.read(folder)
    digests: dict[int, dict[int, str]] = {}  # by life and step
    for log in folder.glob("*.steps"):
        of_life = digests.setdefault(lives.of(int(log.stem)), {})
        for step, digest in _lines(log):
            if of_life.setdefault(step, digest) != digest:
                return [f"ranks differ after step {step}"]
    wrong = []
    begins = 1
    for _, of_life in sorted(digests.items()):
        steps = sorted(of_life) or [begins]
        if not 1 <= steps[0] <= begins or steps != list(range(steps[0], steps[-1] + 1)):
            wrong.append(f"steps are missing: {steps}")
        begins = steps[-1] + 1
    return wrong


def check_samples(folder: Path, plan: Plan) -> list[str]:
    """No sample of an epoch is trained on twice, and none is left out but for a remainder below one
    step.

    Of a step there count, in the last generation of ranks that began it, the batches of each rank's
    last attempt. One that was killed may have read its batch before the others had begun the step:
    they began it without that one.
    """
    lives = Lives.read(folder)
    # by life, step and generation
    reads: dict[int, dict[int, dict[int, list[tuple[int, list[int]]]]]] = {}
    for log in folder.glob("*.samples"):
        of_life = reads.setdefault(lives.of(int(log.stem)), {})
        for (step, generation), batches in _last_attempts(log).items():
            of_life.setdefault(step, {}).setdefault(generation, []).extend(batches)
    epochs = {epoch: Counter[int]() for epoch in range(EPOCHS)}
    until = max((step for of_life in reads.values() for step in of_life), default=0) + 1
    # what a later life has done again does not count
    for _, of_life in sorted(reads.items(), reverse=True):
        for by_generation in (of_life[step] for step in of_life if step < until):
            for epoch, samples in by_generation[max(by_generation)]:
                epochs.setdefault(epoch, Counter()).update(samples)
        until = min([until, *of_life])
    wrong = []
    for epoch, counts in epochs.items():
        if twice := [sample for sample, count in counts.items() if count > 1]:
            wrong.append(f"epoch {epoch} trained on {len(twice)} samples twice")
        if (skipped := SAMPLES - len(counts)) >= plan.ranks * BATCH * plan.accumulate:
            wrong.append(f"epoch {epoch} left out {skipped} samples")
    return wrong


def _last_attempts(log: Path) -> dict[tuple[int, int], list[tuple[int, list[int]]]]:
    """By step and generation, a rank's batches: epoch and samples."""
    found: dict[tuple[int, int], dict[int, list[tuple[int, list[int]]]]] = {}
    for epoch, step, generation, attempt, samples in _lines(log):
        found.setdefault((step, generation), {}).setdefault(attempt, []).append((epoch, samples))
    return {begun: by_attempt[max(by_attempt)] for begun, by_attempt in found.items()}


def _lines(log: Path) -> Iterator[list[Any]]:
    for line in log.read_text().splitlines():
        with contextlib.suppress(ValueError):  # the last line of a killed process
            yield json.loads(line)
