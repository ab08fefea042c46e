"""Runs many seeds: each strategy's job works through them, and a seed is judged when all of its
outcomes are there.
"""

import shutil
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from tests.fuzz.compare import Verdict, judge
from tests.fuzz.jobs import Job, Order, Outcome, one_thread_each
from tests.fuzz.program import draw

MAX_CONFIRMED = 10  # failures that are tried again in fresh processes


class Session:
    """A folder and jobs, both gone in the end. ``limit``: seconds for one program under one
    strategy.
    """

    def __init__(self, limit):
        one_thread_each()
        self._folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        self._limit = limit
        self._stopped = False
        self._cpu_seconds = Counter[str]()
        self._jobs = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._end_jobs()
        shutil.rmtree(self._folder, ignore_errors=True)

    def compare(self, seeds):
        """Judge ``seeds``, print what does not agree and the counts; the seeds that fail, each
        tried again alone.
        """
        begin, counts = time.monotonic(), Counter[str]()
        failures = []
        programs = [draw(seed) for seed in seeds]
        judged = self.verdicts(programs, _tell)
        for program, verdict in zip(programs, judged, strict=True):
            if verdict.fails:
                if len(failures) < MAX_CONFIRMED:
                    verdict = self._confirmed(program, verdict)
                failures.append(f"{program.seed}: {verdict.kind}")
            counts[verdict.kind] += 1
            counts["of these, DDP cannot or is wrong"] += any(
                note.startswith("ddp") for note in verdict.notes
            )
        print(
            f"{len(seeds)} seeds in {time.monotonic() - begin:.0f} s, {_versions()}: {dict(counts)}"
        )
        spent = {name: round(seconds) for name, seconds in self._cpu_seconds.items()}
        print(f"CPU seconds, all ranks of a strategy together: {spent}", flush=True)
        for failure in failures:
            print(f"python -m tests.fuzz --show --seed {failure.replace(':', '  #')}", flush=True)
        return failures

    def verdicts(self, programs, tell):
        """Judge ``programs``, and ``tell`` of each. Every strategy's job takes them in their
        order.
        """
        outcomes = {}
        work = {}
        for index, program in enumerate(programs):
            (self._folder / f"{index}.py").write_text(program.script())
            for strategy in program.strategies:
                ranks = 1 if strategy == "one" else program.ranks
                work.setdefault((strategy, ranks), []).append((index, program))
                outcomes[index, strategy] = Future()
        saved = {key: threading.Event() for key in outcomes}
        found = []
        with ThreadPoolExecutor(len(work)) as threads:
            for key, todo in work.items():
                threads.submit(self._work, key, todo, outcomes, saved)
            try:
                for index, program in enumerate(programs):
                    ended = {name: outcomes[index, name].result() for name in program.strategies}
                    for name, outcome in ended.items():
                        self._cpu_seconds[name] += sum(
                            rank["cpu_seconds"] for rank in outcome.ranks
                        )
                    found.append(judge(program, ended))
                    tell(program, found[-1])
            # Ctrl-C and SIGTERM too: the threads must not go on to the last seed
            except BaseException:
                self._stopped = True
                self._end_jobs()
                for event in saved.values():
                    event.set()
                raise
        return found

    def _work(self, key, todo, outcomes, saved):
        job = self._jobs.setdefault(key, Job(*key, self._folder, self._limit))
        for index, program in todo:
            if self._stopped:
                return
            try:
                outcome = self._run(job, index, program, saved)
            except Exception as error:
                outcome = Outcome(
                    "crash", text=f"the fuzzer itself: {type(error).__name__}: {error}"
                )
            outcomes[index, key[0]].set_result(outcome)

    def _run(self, job, index, program, saved):
        script, folder = str(self._folder / f"{index}.py"), self._folder / f"{index}-{job.strategy}"
        folder.mkdir()
        straight = program.choice("again") == "resumed, and straight" and job.run(
            Order(script, str(folder))
        )
        source = program.source_of.get(job.strategy)
        if source is None or (straight and straight.kind != "ok"):
            return straight or job.run(Order(script, str(folder)))
        outcome = job.run(Order(script, str(folder), save=str(folder / "saved.ckpt")))
        saved[index, job.strategy].set()
        saved[index, source].wait(3 * self._limit)
        if outcome.kind != "ok":
            return outcome
        outcome = job.run(
            Order(script, str(folder), load=str(self._folder / f"{index}-{source}" / "saved.ckpt"))
        )
        outcome.straight = straight.ranks if straight else []
        return outcome

    def _confirmed(self, program, verdict):
        again = self._alone(program)
        if again.fails:
            return again
        return Verdict(
            "LEAKS",
            [f"alone it is {again.kind}; after other seeds {verdict.kind}", *verdict.findings],
        )

    def _alone(self, program):
        """In fresh processes."""
        self._end_jobs()
        for left in self._folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        return self.verdicts([program], lambda *_: None)[0]

    def _end_jobs(self):
        for job in self._jobs.values():
            job.end()
        self._jobs.clear()


def _versions():
    return ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "lightning-ring"))


def _tell(program, verdict):
    if verdict.fails:
        lines = [f"seed {program.seed}: {verdict.kind}", *verdict.findings, *verdict.notes]
        print("\n    ".join([*lines, program.description()]), flush=True)
