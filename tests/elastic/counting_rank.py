"""A rank without torch, for tests of the membership: ``counting_rank.py FOLDER STEPS
[SECONDS_A_STEP]``.

Its state is the list of all ranks' contributions to each step, ``100 * step + rank``; the store of
the view carries them. Each process appends the steps that it finishes to ``FOLDER/NUMBER.log``,
where they outlive a ``kill -9``, and writes its whole history to ``FOLDER/NUMBER.json`` at the end.
"""

import json
import sys
import time
from pathlib import Path

from lightning_ring.elastic.member import Member
from lightning_ring.elastic.membership import GenerationOver, JobEnded, Report

WAIT = 600.0  # longer than a test waits for the job: no rank ends by itself that is not told to


class Rank:
    def __init__(self, folder, steps, seconds):
        self.folder = folder
        self.member = Member()
        self.member.open()
        self.steps, self.seconds = steps, seconds
        self.history = None
        self.complete = None

    @property
    def step(self):
        return None if self.history is None else len(self.history)

    def exchange(self, name, value):
        world = len(self.member.view.members)
        self.member.request(
            {"op": "set", "key": f"{name}/{self.member.rank}", "value": str(value)}, WAIT
        )
        keys = [f"{name}/{rank}" for rank in range(world)]
        return [int(text) for text in self.member.request({"op": "get", "keys": keys}, WAIT)]

    def enter(self, view):
        """Finish the step that the others have finished, and hand the state to newcomers."""
        if self.history is None and view.step is None:
            self.history = []
        if self.history is not None and view.step is not None and len(self.history) < view.step:
            self.commit()
        self.complete = None
        if not view.newcomers:
            return
        if self.member.rank == 0:
            self.member.request(
                {"op": "set", "key": "state", "value": json.dumps(self.history)}, WAIT
            )
        (state,) = self.member.request({"op": "get", "keys": ["state"]}, WAIT)
        if self.history is None:
            self.history = json.loads(state)
        assert self.history == json.loads(state)

    def commit(self):
        self.history.append(self.complete)
        with (self.folder / f"{self.member.number}.log").open("a") as log:
            log.write(json.dumps([len(self.history) - 1, self.complete]) + "\n")
        self.complete = None

    def take_step(self):
        step = len(self.history or [])
        time.sleep(self.seconds)
        self.complete = self.exchange(f"gradient {step}", 100 * step + self.member.rank)
        asked = self.exchange(f"commit {step}", int(self.member.newcomers_wait))
        self.commit()
        if any(asked) and step + 1 < self.steps:
            raise GenerationOver("newcomers wait")

    def train(self):
        while True:
            try:
                self.member.report(Report(self.step, self.complete is not None, between=True))
                self.enter(self.member.next_view(WAIT))
                while (self.step or 0) < self.steps:
                    self.take_step()
                self.exchange("the end", 0)
                self.member.finish()
                return
            except GenerationOver:
                continue


def main():
    folder, steps, *seconds = sys.argv[1:]
    rank = Rank(Path(folder), int(steps), float(seconds[0]) if seconds else 0.0)
    try:
        rank.train()
    except JobEnded as end:
        if end.finished:
            return 0
        print(end, file=sys.stderr, flush=True)
        return 1
    (Path(folder) / f"{rank.member.number}.json").write_text(json.dumps(rank.history))
    return 0


if __name__ == "__main__":
    sys.exit(main())
