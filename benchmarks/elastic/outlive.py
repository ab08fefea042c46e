"""The same death under `ring_elastic`, torchelastic, torchft and Horovod: when training goes on,
and what is lost.

    python -m benchmarks.elastic.outlive --ranks 4 --mib 256 --jobs 5 --horovod PYTHON

Ranks on this host train the same layers with SGD. One of them kills itself (SIGKILL) between
forward and backward of step 13. The clock runs from then to the end of the next optimizer step of
any other rank; beside it to the end of the first step that had not been finished before, and the
number of finished steps that are lost. With ``--join --steps 60`` another process takes the place
of the dead one, and the last column is the longest step of a survivor later. Jobs run one after the
other, and the libraries take turns.

- ``ring_elastic``: a Trainer's fit under ``ringrun --min-ranks 1``, over shared memory; with
  ``:gloo`` over Gloo.
- ``torchelastic``: DDP over Gloo under ``torchrun --standalone --max-restarts 3``, which starts all
  ranks again after a death; they load a checkpoint, which rank 0 saves every 5 steps. All time
  limits are torchrun's defaults. Its store is not shared over restarts
  (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), with which they fail under torch 2.15.
- ``torchft``: one replica group a rank, its manager over Gloo, the lighthouse with its README's
  time limits: a rank is dead 5 s after its last heartbeat, and late ranks are waited for 10 s. With
  ``:1s`` both are 1 s.
- ``horovod``: `hvd.elastic` over Gloo under ``horovodrun``, ``--min-np`` one rank less, its state
  committed after each step. All else is horovodrun's default: Gloo waits 30 s for a message, hosts
  are listed anew every second, and the whole host of a rank that fails is left out for good. Each
  rank is therefore on a host of its own. They are names of 127.0.0.1 (127.0.0.01, 127.0.0.001), on
  which Horovod starts ranks without ssh.

PYTHON are interpreters that have these two.
"""

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.elastic.outlive_rank import DEADLY, STEPS
from benchmarks.turns import Processes, parser_of, prepare

JOB_SECONDS = 600.0  # of a job that comes no further
END_SECONDS = 40.0  # for a job's end after its last step, and after SIGTERM


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one job. Times are in seconds from the death; ``step`` is the median step before it."""

    step: float
    next_step: float
    new_step: float
    lost: int
    join: float = 0.0  # the longest step of a survivor afterwards, in which another process joins


class Job(Processes):
    """The processes of a job, which trains up to the step ``last``."""

    def __init__(self, folder, last=STEPS):
        super().__init__(folder)
        self._last = last
        self._servers = []

    def serve(self, *command):
        """Start a process that does not end by itself."""
        self._servers.append(self.start(command))

    def train(self):
        """Return once a process has finished the last step, and the others had time to end.

        Raises `SystemExit`: none has, and all have ended, or nothing came in time.
        """
        until = time.monotonic() + JOB_SECONDS
        ranks = [process for process in self.running if process not in self._servers]
        while all(steps[-1][0] < self._last for steps in finished_steps(self.folder).values()):
            ended = all(process.poll() is not None for process in ranks)
            if ended or time.monotonic() > until:
                raise SystemExit(f"a job came to no end:\n{self.outputs()}")
            time.sleep(0.05)
        until = time.monotonic() + END_SECONDS
        while any(process.poll() is None for process in ranks) and time.monotonic() < until:
            time.sleep(0.05)


def rank(loop, folder, asked):
    words = [loop, str(folder), "--mib", str(asked.mib), "--ranks", str(asked.ranks)]
    return ["-m", "benchmarks.elastic.outlive_rank", *words, "--steps", str(asked.steps)]


def ring_elastic(job, folder, asked, backend):
    ringrun = [sys.executable, "-m", "lightning_ring.cli.ringrun", "-n", str(asked.ranks)]
    ringrun += ["--min-ranks", "1"] + (["--respawn"] if asked.join else [])
    trains = [sys.executable, *rank("ring_elastic", folder, asked), "--backend", backend]
    job.start([*ringrun, *trains])


def torchelastic(job, folder, asked):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--max-restarts", "3", "--nproc-per-node", str(asked.ranks)]
    # Else ranks that start again meet in the store of those before, and connect to addresses of the
    # dead: https://github.com/pytorch/pytorch/issues/135712
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    job.start([*torchrun, *rank("torchelastic", folder, asked)], **own_store)


def torchft(job, folder, asked, heartbeats=5000, join=10000):
    """Time limits of the lighthouse are in milliseconds."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    limits = ["--heartbeat_timeout_ms", str(heartbeats), "--join_timeout_ms", str(join)]
    options = ["--min_replicas", "1", "--quorum_tick_ms", "100", *limits, "--bind", f"[::]:{port}"]
    job.serve(str(Path(asked.torchft).with_name("torchft_lighthouse")), *options)
    for number in range(asked.ranks):
        command = [asked.torchft, *rank("torchft", folder, asked), "--number", str(number)]
        if asked.join and number == 1:
            command = ["sh", "-c", '"$@"; "$@"', "sh", *command]  # once more after its death
        job.start(command, TORCHFT_LIGHTHOUSE=f"http://localhost:{port}")


def horovod(job, folder, asked):
    hosts = folder / "hosts"
    listed = "".join(f"echo 127.0.0.{'0' * number}1:1\n" for number in range(asked.ranks))
    hosts.write_text(f"#!/bin/sh\n{listed}")
    hosts.chmod(0o755)
    horovodrun = [str(Path(asked.horovod).with_name("horovodrun")), "-np", str(asked.ranks)]
    horovodrun += ["--min-np", str(asked.ranks - 1), "--host-discovery-script", str(hosts)]
    job.start([*horovodrun, asked.horovod, *rank("horovod", folder, asked)])


Start = Callable[[Job, Path, argparse.Namespace], None]
CONTENDERS = {
    "ring_elastic": lambda *job: ring_elastic(*job, "auto"),
    "ring_elastic:gloo": lambda *job: ring_elastic(*job, "gloo"),
    "torchelastic": torchelastic,
    "torchft": torchft,
    "torchft:1s": lambda *job: torchft(*job, heartbeats=1000, join=1000),
    "horovod": horovod,
}
PEERS = ("torchft", "horovod")  # each runs under an interpreter of its own


def finished_steps(folder):
    """Steps and when they were finished, of each process that has finished any, by its pid."""
    found = {}
    for path in folder.glob("*.steps"):
        lines = path.read_text().split("\n")[:-1]  # the last one may be half written
        if lines:
            found[int(path.stem)] = [(step, when) for step, when in map(json.loads, lines)]
    return found


def outcome(died, processes):
    """What the steps of the processes of a job tell, one of which died in step `DEADLY`."""
    before = []
    for steps in processes:
        # The first steps make buckets and connections.
        known = [when for step, when in steps if 2 < step < DEADLY and when <= died]
        before += [later - earlier for earlier, later in pairwise(known)]
    afterwards = [
        (step, when)
        for steps in processes
        for number, (step, when) in enumerate(steps)
        # a step that another rank was finishing at the death may end a moment later
        if when > died and (step >= DEADLY or steps[0][1] > died or step in dict(steps[:number]))
    ]
    return Outcome(
        step=statistics.median(before),
        next_step=min(when for _, when in afterwards) - died,
        new_step=min(when for step, when in afterwards if step >= DEADLY) - died,
        lost=len({step for step, _ in afterwards if step < DEADLY}),
        join=max(longest_step(steps, died) for steps in processes),
    )


def longest_step(steps, died):
    """Of a process that trained before the death, but for the first step after it."""
    later = [when for _, when in steps if when > died]
    survived = steps[0][1] < died
    return max((b - a for a, b in pairwise(later)), default=0.0) if survived else 0.0


def run(start, asked):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Job(folder, asked.steps) as job:
            start(job, folder, asked)
            job.train()
        return outcome(float((folder / "died").read_text()), list(finished_steps(folder).values()))


def report(found):
    ends = "the next step ends after | a new step ends after"
    yield f"| | a step before | {ends} | finished steps lost | longest step later |"
    yield "|---|---|---|---|---|---|"
    for name, jobs in found.items():
        times = [[getattr(job, field) for job in jobs] for field in ("next_step", "new_step")]
        shown = [f"{statistics.median(each):.2f} s (largest {max(each):.2f})" for each in times]
        lost = statistics.median(job.lost for job in jobs)
        step = 1e3 * statistics.median(job.step for job in jobs)
        join = statistics.median(job.join for job in jobs)
        yield f"| {name} | {step:.0f} ms | {shown[0]} | {shown[1]} | {lost:g} | {join:.2f} s |"


def main():
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--ranks", type=int, default=4)
    add("--mib", type=float, default=256.0, help="of gradients")
    add("--jobs", type=int, default=5, help="of each")
    add("--steps", type=int, default=STEPS)
    add("--join", action="store_true", help="another process takes the place of the dead one")
    add("--contenders", nargs="+", choices=CONTENDERS, help="by default all that are there")
    add("--torchft", metavar="PYTHON", help="interpreter with torchft, its lighthouse beside it")
    add("--horovod", metavar="PYTHON", help="interpreter with horovod, its horovodrun beside it")
    asked = parser.parse_args()
    prepare()
    missing = tuple(peer for peer in PEERS if not getattr(asked, peer))
    for name in asked.contenders or ():
        if name.startswith(missing):
            parser.error(f"{name} runs under the interpreter that --{name.partition(':')[0]} names")
    names = asked.contenders or [name for name in CONTENDERS if not name.startswith(missing)]
    found = {name: [] for name in names}
    for _ in range(asked.jobs):
        for name in names:
            found[name].append(run(CONTENDERS[name], asked))
            print(f"{name}: {found[name][-1]}", file=sys.stderr, flush=True)
    print(*report(found), sep="\n")
    print(f"\n{asked.ranks} ranks, {asked.mib:g} MiB, {asked.jobs} jobs each")


if __name__ == "__main__":
    main()
