"""A few random programs under every strategy, which together draw every option. More of them:
``python -m tests.fuzz --seeds 0:1000``.
"""

import ast
from collections import Counter

import pytest

from tests import forked
from tests.fuzz.program import AXES, draw
from tests.processes import run

SECONDS = 240  # two cores need some 35 s


def drawn(program):
    choices = {f"{axis}: {program.choice(axis)}" for axis in AXES}
    return choices | {*program.blocks, *program.hooks, f"{program.ranks} ranks"}


def covering(among):
    """Seeds that draw every option together: those of the rarest options first."""
    left = {seed: drawn(draw(seed)) for seed in range(among)}
    seeds_of = Counter(option for options in left.values() for option in options)
    seeds = []
    while any(left.values()):
        seeds.append(max(left, key=lambda seed: sum(1 / seeds_of[each] for each in left[seed])))
        known = left[seeds[-1]]
        left = {seed: options - known for seed, options in left.items()}
    return seeds


@pytest.mark.ranks
@pytest.mark.timeout(SECONDS + 30)
def test_strategies_agree():
    seeds = ",".join(map(str, covering(among=1000)))
    result = run([*forked.python(), "-m", "tests.fuzz", "--seeds", seeds], timeout=SECONDS)
    assert result.returncode == 0, result.stdout


def test_every_seed_is_a_script_and_every_option_is_drawn():
    programs = [draw(seed) for seed in range(700)]
    for program in programs[:50]:
        ast.parse(program.script())
    for axis, options in AXES.items():
        found = {program.choice(axis) for program in programs}
        assert found >= {name for name, option in options.items() if option.weight}, axis


def test_a_seed_is_one_program():
    assert draw(17) == draw(17)
    assert draw(17).script() != draw(18).script()
