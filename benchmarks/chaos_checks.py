"""What must be true of a planted job when it is over."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.chaos_job import Job
from benchmarks.chaos_plan import BATCH, SAMPLES, Plan

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
        wrong: What is wrong, in words.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._folder, self._plan = job, job.folder, job.plan
        self.faults = [line.split() for log in job.folder.glob("*.fault") for line in log.read_text().splitlines()]
        self._said = "".join(path.read_text(errors="replace") for path in job.folder.glob("*.out"))
        self._codes = {int(path.stem): int(path.read_text()) for path in job.folder.glob("*.code")}
        self.finished = job.code == 0
        self.lost = _LOST_SHARDS in self._said and job.plan.sharded and bool(self.faults)
        self.joined = len([path for path in job.folder.glob("*.steps") if int(path.stem) >= job.plan.ranks])
        self.wrong = [*job.wrong, *self._check_end(), *check_steps(job.folder), *self._check_checkpoints()]
        if self.finished:
            self.wrong += check_samples(job.folder, job.plan)
        self.wrong += [f"left behind: {path}" for path in job.folder.glob("tmp/lightning*") if not job.steward_died]

    def _check_end(self) -> list[str]:
        kinds = {kind for _, _, _, kind in self.faults}
        if self._job.steward_died:
            told = self._said.count("has gone: they end")
            silent = "host" in kinds  # the power of its own host failed
            return [] if told == 1 or silent else [f"the steward's death was told {told} times"]
        if self.finished:
            failed = self._unexpected(lambda code: code != 0)
            wrong = [f"processes {failed} failed by themselves: {self._last_lines()}"] if failed else []
            return wrong if 0 in self._codes.values() else [*wrong, "nobody finished"]
        if self.lost or any(reason in self._said for kind in kinds for reason in _REASONS.get(kind, ())):
            killed = self._unexpected(lambda code: code < 0)
            return [f"processes {killed} did not end with the job, and were killed"] if killed else []
        return [f"the job ended with code {self._job.code}: {self._last_lines()}"]

    def _unexpected(self, is_wrong: Callable[[int], bool]) -> dict[int, int]:
        """The exit codes of ranks without a fault, on hosts without one."""
        excused = {int(number) for number, _, _, _ in self.faults}
        codes = {} if self._job.lost_hosts else self._codes
        return {number: code for number, code in codes.items() if is_wrong(code) and number not in excused}

    def _check_checkpoints(self) -> list[str]:
        """Each can be loaded, but for one that Lightning was writing when the disk was full."""
        errors = []
        for path in self._folder.glob("disk/checkpoints/*.ckpt"):
            try:
                torch.load(path, weights_only=False)
            except Exception as error:
                errors.append(f"{path.name} cannot be loaded: {type(error).__name__}: {error}"[:300])
        half = int(any(kind == "disk" for *_, kind in self.faults))
        return errors if len(errors) > half else []

    def _last_lines(self) -> str:
        return " | ".join((self._folder / "launcher.out").read_text(errors="replace").strip().splitlines()[-2:])[:800]


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
        if (skipped := SAMPLES - len(counts)) >= plan.ranks * BATCH * plan.accumulate:
            wrong.append(f"epoch {epoch} left out {skipped} samples")
    return wrong
