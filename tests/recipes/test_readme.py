"""The commands that the README gives are those that run."""

from __future__ import annotations

import dataclasses
import re
import subprocess

import pytest
from hydra import compose, initialize_config_dir
from lightning_ring.options import RingOptions

import lightning_ring.errors
from tests.launch import ROOT

README = (ROOT / "README.md").read_text()
COMMANDS = [block for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) if "venv .venv" in block]


def test_quick_start_has_two_commands_of_one_line():
    assert [command.count("\n") for command in COMMANDS] == [1, 1]
    assert "recipes/train.py" in COMMANDS[0]
    assert "pytest" in COMMANDS[1]


def test_ci_runs_the_readmes_test_command():
    assert COMMANDS[1] in (ROOT / ".ci" / "run").read_text()


def test_ci_script_is_a_valid_executable():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)


@pytest.mark.parametrize("line", re.findall(r"^(?:.* )?python recipes/train\.py([^#\n]*)", README, re.MULTILINE))
def test_recipe_commands_compose(line):
    overrides = [word.partition(",")[0] for word in line.split() if not word.startswith("-")]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        assert compose("train", overrides=overrides).name


def test_argument_table_is_the_strategys():
    table = README.split("### Arguments")[1].split("\n#")[0]
    documented = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(documented) == sorted(field.name for field in dataclasses.fields(RingOptions))


def test_every_error_is_explained():
    errors = [name for name, value in vars(lightning_ring.errors).items() if isinstance(value, type)]
    assert [name for name in errors if f"`{name}`" not in README] == []
