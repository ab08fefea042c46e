"""The commands of README and docs: options are ones that there are, and short commands run.

`tests.follow_docs` types all of them, which takes most of an hour.
"""

import argparse
import importlib
import os
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from lightning_ring.cli import ringrun
from tests import forked
from tests.follow_docs import commands, pages
from tests.processes import ROOT, run

COMMANDS = list(dict.fromkeys(command for page in pages() for _, command in commands(page)))
PARSED = [
    command
    for command in COMMANDS
    if command.startswith(("lightning-ring ", "ringrun ", "sudo python -m ", "python -m tests."))
    or command.startswith(("python -m benchmarks.", "python recipes/slow_job", "python recipes/f"))
]
FOLLOWED = {
    "report.html": ["python recipes/train.py experiment=debug", "lightning-ring report logs"],
    "steps.png": [
        "RING_TIMELINE=logs/trace.json python docs/examples/train.py",
        "lightning-ring timeline logs",
        "lightning-ring timeline logs/trace.json --plot steps.png --steps 19-20",
    ],
    "model.pt": [
        "ringrun -n 2 docs/examples/plain_loop.py ring model.pt",
        "python docs/examples/plain_loop.py ring_sharded model.pt",
    ],
    "shards/manifest.json": [
        "python recipes/slow_job.py draw pictures",
        "lightning-ring pack pictures/ shards/",
        "lightning-ring pack --append pictures/ shards/",
        "lightning-ring pack --verify shards/",
    ],
}
"""Short commands in an order in which each finds what it reads, by a file that they leave."""


class ParsedError(Exception):
    """Raised as soon as a command has read its arguments."""


def start(command):
    """Run ``command`` in this process."""
    program, *words = shlex.split(command.removeprefix("sudo "))
    if program == "lightning-ring":
        importlib.import_module(f"lightning_ring.cli.{words[0]}").main(words[1:])
    elif program == "ringrun":
        ringrun.main(words)
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")


@pytest.mark.parametrize("command", PARSED)
def test_options_are_ones_that_there_are(command, monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def only_parse(parser, *arguments):
        parse(parser, *arguments)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
    monkeypatch.setattr(sys, "argv", sys.argv)
    with pytest.raises(ParsedError):
        start(command)


def test_scripts_that_commands_name_are_there():
    scripts = {
        word
        for command in COMMANDS
        for word in shlex.split(command)
        if word.startswith(("recipes/", "docs/")) and word.endswith(".py")
    }
    assert len(scripts) >= 8
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


@pytest.mark.ranks
@pytest.mark.parametrize("left", FOLLOWED)
def test_short_commands_can_be_followed(left, tmp_path):
    assert set(FOLLOWED[left]) <= set(COMMANDS)
    for folder in ("recipes", "configs", "docs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    script = "\n".join(["set -ex", *FOLLOWED[left], "times"])
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = run(["env", "-C", str(tmp_path), f"PATH={path}", "bash", "-c", script], **forked.every())
    assert done.returncode == 0, done.stdout
    print(done.stdout)
    assert (tmp_path / left).stat().st_size > 0
