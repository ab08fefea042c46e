"""What a seed of `chaos.py` decides: the ranks of a job, where they run, and their faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

SAMPLES, BATCH, EPOCHS = 96, 4, 2
GRADIENTS, BUCKETS = 6, 2
PLACES = (
    *("forward", *(f"gradient {number}" for number in range(GRADIENTS))),
    *(f"bucket {number}" for number in range(BUCKETS)),  # that this rank is about to wait for
    *("averages", "commit", "step", "batch_end", "validation", "save", "epoch_end"),
)
# of every entry into the fit
SET_UP = ("setup", "fit_start", "train_start")
# also where others join. "address": this rank has told the others where Gloo listens
AFTER_A_DEATH = ("recovery", "open", "address", "connect")
WHERE_OTHERS_JOIN = ("dump", "send", "hold", "load", *SET_UP)
OF_NEWCOMERS = ("send", "hold", "load", *SET_UP, "forward", "commit")  # in addition
# in addition, with sharded optimizers; and "move" after a death
SHARDED_PLACES = ("mirror", "gather")
# Callbacks of a fit: some of these, or one with which no process joins
CALLBACKS = (
    *("save_link", "every_2_steps", "accumulation", "finetuning", "ema"),
    *("early_stopping", "lr_monitor", "user", "user"),
)
KEEPING_OUT = ("pruning", "swa")

# How often each is drawn. The rank does these to itself. "exit" is an exit code that is no
# signal's, which ends the job as an exception would; "stop" is SIGSTOP; "oom" the kernel's answer
# in a cgroup.
OF_RANKS = {"kill": 8, "exit": 1, "stop": 2, "oom": 3}
# These the rank asks the job's driver for, or does to what it shares with others, and goes on, if
# it can. "disk" and "shm" are full from then on: the folder of checkpoints and logs, and /dev/shm
OF_MACHINES = {"disk": 1, "shm": 1, "steward": 1, "steward_stop": 1}
OF_HOSTS = {"cut": 5, "host": 3, "agent": 3, "agent_stop": 2}  # "host" is a power failure
_SECONDS = {"cut": (0.0, 0.2, 0.6, 2.5), "steward_stop": (0.5, 2.5), "agent_stop": (0.5, 2.5, 6.0)}


@dataclass(frozen=True, slots=True)
class Fault:
    """In process ``number``, once ``step`` steps are finished, when it comes to ``place``. Where
    processes have joined it has entered the fit again, which counts as a step. A cut link is
    mended after ``seconds``, or never (0); a stopped launcher or agent goes on."""

    number: int
    step: int
    place: str
    kind: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A job: its ranks, where they run, its faults.

    With ``hosts`` each host is a network namespace; else all ranks are here, on pretended
    ``nodes``, which they take by turns. A dead process is replaced up to ``respawns`` times.
    """

    seed: int
    ranks: int
    backend: str = "auto"
    accumulate: int = 1
    respawns: int = 0
    faults: tuple[Fault, ...] = ()
    nodes: int = 1
    sharded: bool = False  # optimizers
    hosts: int = 0
    workers: int = 0  # processes of the training loader
    pace: float = 0.0  # seconds of a forward
    callbacks: tuple[str, ...] = ()

    @property
    def most_accumulated(self):
        """Batches of a step."""
        return 2 if "accumulation" in self.callbacks else self.accumulate

    def host_of(self, number):
        """Of one of the first processes."""
        return number // (self.ranks // self.hosts) if self.hosts else 0


def draw(seed):
    draws = random.Random(seed)
    hosts = draws.choice([0, 0, 0, 2, 3])
    ranks, nodes = draws.choice(
        {
            0: [(2, 1), (3, 1), (4, 1), (5, 1), (4, 2), (6, 2), (6, 3)],
            2: [(4, 1), (6, 1)],
            3: [(3, 1), (6, 1)],
        }[hosts]
    )
    sharded = draws.random() < 0.4
    callbacks = draw_callbacks(draws)
    respawns = draws.choice([1, 2]) if callbacks else draws.choice([0, 1, 2])
    plan = Plan(
        seed,
        ranks,
        backend=draws.choice(["auto", "gloo"]) if nodes == 1 else "auto",
        accumulate=1 if "accumulation" in callbacks else draws.choice([1, 1, 2]),
        respawns=respawns,
        faults=(),
        nodes=nodes,
        sharded=sharded,
        hosts=hosts,
        workers=int(draws.random() < 0.2),
        # so that newcomers come in time
        pace=draws.choice([0.0, 0.2, 0.3, 0.3]) if respawns else 0.0,
        callbacks=callbacks,
    )
    return with_faults(plan, draws)


def draw_callbacks(draws):
    found = draws.random()
    if found < 0.3:
        return ()
    if found < 0.4:
        return (draws.choice(KEEPING_OUT),)
    return tuple(sorted({draws.choice(CALLBACKS) for _ in range(draws.randint(1, 4))}))


def with_faults(plan, draws):
    """``plan`` with faults. One rank beside the steward has none, rank 0 as often as others."""
    survivor = draws.randrange(plan.ranks // plan.hosts if plan.hosts else plan.ranks)
    others = [number for number in range(plan.ranks) if number != survivor]
    weights = OF_RANKS | OF_MACHINES | (OF_HOSTS if plan.hosts else {})
    steps = EPOCHS * (SAMPLES // (BATCH * plan.ranks * plan.accumulate))  # while nobody has died
    after_a_death = (*AFTER_A_DEATH, "move") if plan.sharded else AFTER_A_DEATH
    if plan.respawns:
        after_a_death += WHERE_OTHERS_JOIN * 2
    faults = []
    # so that also both ranks that hold a shard die
    at_once = plan.sharded and draws.random() < 0.3
    for number in draws.sample(others, len(others) if at_once else draws.randint(1, len(others))):
        (kind,) = draws.choices(list(weights), list(weights.values()))
        together = faults and (at_once or draws.random() < 0.3)
        # where others come in their place, most are early
        until = steps if not plan.pace or draws.random() < 0.3 else max(2, steps // 2)
        step = faults[-1].step if together else draws.randrange(1, until)
        if together and (at_once or draws.random() < 0.5):
            place = faults[-1].place
        elif faults and draws.random() < 0.4:
            place = draws.choice(after_a_death)
        elif draws.random() < 0.07:
            step, place = 0, draws.choice(SET_UP)
        else:
            place = draws.choice((*PLACES, *SHARDED_PLACES * 3) if plan.sharded else PLACES)
        if kind.startswith("agent") and plan.host_of(number) == 0:
            kind = "kill"  # there is none beside the steward
        seconds = draws.choice(_SECONDS.get(kind, (0.0,)))
        faults.append(Fault(number, step, place, kind, seconds))
    # of one that joins
    for number in range(plan.ranks, plan.ranks + draws.randint(0, plan.respawns)):
        kind = draws.choices(list(OF_RANKS), list(OF_RANKS.values()))[0]
        place = draws.choice((*after_a_death, *OF_NEWCOMERS))
        faults.append(Fault(number, draws.choice([0, 1]), place, kind))
    return replace(plan, faults=tuple(faults))
