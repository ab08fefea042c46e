"""A few dozen random programs under every strategy. More of them: ``python -m tests.fuzz --seeds
0:1000``.
"""

from __future__ import annotations

import ast
import sys

import pytest

from tests.fuzz.program import AXES, draw
from tests.processes import run

SECONDS = 240  # two cores need some 35 s


@pytest.mark.ranks
@pytest.mark.timeout(SECONDS + 30)
def test_strategies_agree() -> None:
    result = run([sys.executable, "-m", "tests.fuzz", "--seeds", "0:26"], timeout=SECONDS)
    assert result.returncode == 0, result.stdout


@pytest.mark.ranks
def test_every_seed_is_a_script_and_every_option_is_drawn() -> None:
    programs = [draw(seed) for seed in range(700)]
    for program in programs[:100]:
        ast.parse(program.script())
    for axis, options in AXES.items():
        drawn = {program.choice(axis) for program in programs}
        assert drawn >= {name for name, option in options.items() if option.weight}, axis


def test_a_seed_is_one_program() -> None:
    assert draw(17) == draw(17)
    assert draw(17).script() != draw(18).script()
