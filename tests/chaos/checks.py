"""What must be true of a planted job when it is over."""

import contextlib
import json
from bisect import bisect_right
from collections import Counter

import torch

from tests.chaos.plan import BATCH, EPOCHS, SAMPLES

_LOST_SHARDS = "optimizer's state are lost"
_CANNOT_GO_BACK = (
    *("has saved no checkpoint", "lost their state before the next checkpoint"),
    "A fit with ModelPruning is not entered again",
)
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
        lost: Whether the job said that it lost a shard, and cannot go on from a checkpoint.
        joined: Number of processes that came later and trained.
        returns: How often all ranks went back to a checkpoint.
        wrong: What is wrong, in words.
    """

    def __init__(self, job):
        self._job, self._folder, self.plan = job, job.folder, job.plan
        self.standstill = job.standstill
        self.returns = len(generations_of_returns(job.folder))
        self.faults = [
            line.split()
            for log in job.folder.glob("*.fault")
            for line in log.read_text().splitlines()
        ]
        self._said = "".join(path.read_text(errors="replace") for path in job.folder.glob("*.out"))
        self._codes = {int(path.stem): int(path.read_text()) for path in job.folder.glob("*.code")}
        self.finished = job.code == 0
        lost = _LOST_SHARDS in self._said and job.plan.sharded and bool(self.faults)
        self.lost = lost and any(reason in self._said for reason in _CANNOT_GO_BACK)
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
        saved = [*job.folder.glob("disk/checkpoints/**/*.ckpt")]
        if saved and _CANNOT_GO_BACK[0] in self._said and not _is_full(self.faults):
            self.wrong.append(f"checkpoints that were not found: {[one.name for one in saved]}")
        self.wrong += [
            f"left behind: {path}"
            for path in job.folder.glob("tmp/lightning*")
            if not job.steward_died
        ]

    def _check_end(self):
        kinds = {kind for _, _, _, kind in self.faults}
        if self._job.steward_died:
            told = self._said.count("has gone: they end")
            silent = "host" in kinds  # the power of its own host failed
            return [] if told == 1 or silent else [f"the steward's death was told {told} times"]
        if self.finished:
            failed = self._unexpected(lambda code: code != 0)
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

    def _unexpected(self, is_wrong):
        """The exit codes of ranks without a fault, on hosts without one."""
        excused = {int(number) for number, _, _, _ in self.faults}
        codes = {} if self._job.lost_hosts else self._codes
        return {
            number: code
            for number, code in codes.items()
            if is_wrong(code) and number not in excused
        }

    def _check_checkpoints(self):
        errors = []
        for path in self._folder.glob("disk/checkpoints/**/*.ckpt"):
            try:
                torch.load(path, weights_only=False)
            except Exception as error:
                errors.append(
                    f"{path.name} cannot be loaded: {type(error).__name__}: {error}"[:300]
                )
        return errors

    def _last_lines(self):
        return " | ".join(
            (self._folder / "launcher.out").read_text(errors="replace").strip().splitlines()[-2:]
        )[:800]


def _is_full(faults):
    return any(kind in ("disk", "shm") for *_, kind in faults)


def generations_of_returns(folder):
    """The generations at whose beginning all ranks went back to a checkpoint on disk."""
    logs = [log.read_text().split() for log in folder.glob("*.backs")]
    return sorted({int(generation) for log in logs for generation in log})


def check_steps(folder):
    """Every step that some rank has finished is in one history, whose weights are the same on all
    ranks.

    Where all ranks went back to a checkpoint, another history begins after it.
    """
    returns = generations_of_returns(folder)
    digests = {}  # by history and step
    wrong = []
    for log in folder.glob("*.steps"):
        for generation, step, digest, counted in _lines(log):
            history = digests.setdefault(bisect_right(returns, generation), {})
            if history.setdefault(step, digest) != digest:
                wrong.append(f"ranks differ after step {step} of generation {generation}")
            if any(count != step for count in counted):
                wrong.append(f"a callback has counted {counted} steps of {step}")
    begins = 1
    for _, history in sorted(digests.items()):
        steps = sorted(history)
        if not 1 <= steps[0] <= begins or steps != list(range(steps[0], steps[-1] + 1)):
            wrong.append(f"steps are missing: {steps}, expected from {begins} on")
        begins = steps[-1] + 1
    return wrong[:5]


def check_samples(folder, plan):
    """No sample of an epoch is trained on twice, and none is left out but for a remainder below one
    step.

    Of a step there count, in the last generation of ranks that began it, the batches of each rank's
    last attempt. One that was killed may have read its batch before the others had begun the step:
    they began it without that one.
    """
    batches = [(*begun, read) for log in folder.glob("*.samples") for begun, read in _reads(log)]
    resumed_within = set()
    for returned in generations_of_returns(folder):
        # what has been done again after a checkpoint counts once
        again = [step for step, generation, _ in batches if generation >= returned]
        first = min(again, default=float("inf"))
        batches = [one for one in batches if one[1] >= returned or one[0] < first]
        # torch's loader begins such an epoch with its first samples, as in any resumed job
        before, after = (
            {epoch for step, _, read in batches for epoch, _ in read if (step < first) is earlier}
            for earlier in (True, False)
        )
        resumed_within |= before & after
    latest = {}
    for step, generation, _ in batches:
        latest[step] = max(generation, latest.get(step, 0))
    epochs = {epoch: Counter[int]() for epoch in range(EPOCHS)}
    for step, generation, read in batches:
        for epoch, samples in read if generation == latest[step] else ():
            epochs.setdefault(epoch, Counter()).update(samples)
    wrong = []
    for epoch in epochs.keys() - resumed_within:
        counts = epochs[epoch]
        if twice := [sample for sample, count in counts.items() if count > 1]:
            wrong.append(f"epoch {epoch} trained on {len(twice)} samples twice")
        if (skipped := SAMPLES - len(counts)) >= plan.ranks * BATCH * plan.most_accumulated:
            wrong.append(f"epoch {epoch} left out {skipped} samples")
    return wrong


def _reads(log):
    """Step and generation, with a rank's batches of its last attempt: epoch and samples."""
    found = {}
    for epoch, step, generation, attempt, samples in _lines(log):
        found.setdefault((step, generation), {}).setdefault(attempt, []).append((epoch, samples))
    for begun, by_attempt in found.items():
        yield begun, by_attempt[max(by_attempt)]


def _lines(log):
    for line in log.read_text().splitlines():
        with contextlib.suppress(ValueError):  # the last line of a killed process
            yield json.loads(line)
