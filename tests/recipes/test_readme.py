"""The commands that the README gives are those that run."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import lightning_ring.errors
from lightning_ring.options import RingOptions
from tests.processes import ROOT, run

README = (ROOT / "README.md").read_text()
COMMANDS = [block for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) if "venv .venv" in block]


def test_quick_start_has_two_commands_of_one_line():
    assert [command.count("\n") for command in COMMANDS] == [1, 1]
    assert "recipes/train.py" in COMMANDS[0]
    assert "pytest" in COMMANDS[1]


@pytest.fixture
def checkout(tmp_path):
    """A folder with `.ci/run`, and a ``python3`` that fails after it has said what it was asked for."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "python3 $@"\nexit 9\n')
    python.chmod(0o755)
    return tmp_path


def ci_run(checkout: Path) -> subprocess.CompletedProcess[str]:
    path = f"{checkout / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return run([str(checkout / ".ci" / "run")], timeout=20, PATH=path)


def test_ci_runs_the_readmes_test_command():
    assert COMMANDS[1].strip() in (ROOT / ".ci" / "run").read_text()


@pytest.mark.ranks
def test_ci_fails_when_the_environment_cannot_be_made(checkout):
    result = ci_run(checkout)
    assert result.returncode == 1
    assert result.stdout == "python3 -m venv .venv\n"


@pytest.mark.ranks
def test_ci_replaces_a_broken_environment(checkout):
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to("/nonexistent/python")
    ci_run(checkout)
    assert not (checkout / ".venv").exists()


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
