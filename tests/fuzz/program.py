"""A random program, drawn from a seed: one that the Trainer runs, a loop by hand, or a loop with
Horovod's API.
"""

import random
from dataclasses import dataclass, field

from tests.fuzz.loop_features import HOROVOD, LOOP
from tests.fuzz.module_features import BLOCKS, HOOKS, MODULE
from tests.fuzz.rules import settle
from tests.fuzz.script import render
from tests.fuzz.trainer_features import TRAINER

FAMILIES = {"trainer": MODULE | TRAINER, "loop": LOOP, "horovod": HOROVOD}
AXES = {axis: options for family in FAMILIES.values() for axis, options in family.items()}
STRATEGIES = ("one", "ddp", "ring", "ring_sharded")


@dataclass
class Program:
    """What was drawn for ``seed``. ``choices``: axis -> option; an axis that is not in it has
    its first option.
    """

    seed: int
    family: str = "trainer"
    ranks: int = 2
    blocks: list[str] = field(default_factory=lambda: ["Linear()"])
    hooks: list[str] = field(default_factory=list)
    choices: dict[str, str] = field(default_factory=dict)

    def choice(self, axis):
        return self.choices.get(axis, next(iter(AXES[axis])))

    def options(self):
        chosen = [options[self.choice(axis)] for axis, options in FAMILIES[self.family].items()]
        return (
            [BLOCKS[block] for block in self.blocks] + chosen + [HOOKS[hook] for hook in self.hooks]
        )

    @property
    def strategies(self):
        """Those that the program has one meaning under."""
        without = {name for option in self.options() for name in option.without}
        return [
            name
            for name in (STRATEGIES if self.family != "horovod" else ("one", "horovod"))
            if name not in without
        ]

    @property
    def source_of(self):
        """Strategy -> the strategy whose checkpoint it resumes; empty where the program resumes
        nothing.
        """
        names, how = self.strategies, self.choice("again")
        if not how.startswith("resumed"):
            return {}
        if how == "resumed, and straight":
            return {name: name for name in names}
        parallel = [name for name in names if name != "one"]
        if how == "resumed on another number of ranks":
            return dict.fromkeys(parallel, "one") | {"one": parallel[-1]}
        drifts = self.choice("freeze") in (
            "first layer thawed later",
            "new layer in the second epoch",
        )
        # where DDP fails, it leaves no checkpoint to go on from; where its ranks drift apart, a
        # wrong one
        if drifts or any("reentrant=True" in block for block in self.blocks):
            parallel = [name for name in parallel if name != "ddp"]
        after = dict(zip(parallel, parallel[-1:] + parallel[:-1], strict=True))
        return dict.fromkeys(names, parallel[-1]) | after

    def description(self):
        changed = [
            f"{axis}: {self.choice(axis)}"
            for axis in AXES
            if self.choice(axis) != next(iter(AXES[axis]))
        ]
        parts = [self.family, f"{self.ranks} ranks", " > ".join(self.blocks), *changed]
        return "; ".join(parts + [f"hook: {hook}" for hook in self.hooks])

    def script(self):
        return render(self)


def draw(seed):
    """The same program for the same seed, on every machine."""
    chance = random.Random(seed)

    def pick(options):
        return chance.choices(list(options), [option.weight for option in options.values()])[0]

    family = "horovod" if seed % 10 == 9 else ("trainer", "loop")[seed % 2]
    program = Program(seed, family, ranks=chance.choices([2, 3], [6, 1])[0])
    program.blocks = [pick(BLOCKS) for _ in range(chance.randint(2, 4))]
    program.hooks = chance.sample(list(HOOKS), chance.choices([0, 1, 2], [3, 3, 1])[0])
    # half of the other axes stay plain, so that a program can be read and a finding has few causes
    program.choices = {
        axis: pick(options) for axis, options in FAMILIES[family].items() if chance.random() < 0.5
    }
    settle(program)
    return program
