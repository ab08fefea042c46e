"""The dispatcher: what `lightning-ring` lists is there, and listing it imports none of it."""

import importlib.util
import subprocess
import sys

import pytest

from lightning_ring.cli import main as dispatcher
from lightning_ring.tools.plan.inputs import write_profile
from tests.processes import clean_env
from tests.tools.plan.profiles import profile, several


def test_every_listed_command_is_there():
    for name, what in dispatcher.COMMANDS.items():
        assert importlib.util.find_spec(f"lightning_ring.cli.{name}") is not None
        assert what


CODE = """
import sys
from lightning_ring.cli.main import main
try:
    main(["--help"])
except SystemExit as end:
    planned = main(["plan", sys.argv[1], "--network", "1gbit", "--ranks", "1,2"])
    print(end.code, planned, sorted(sys.modules.keys() & {"torch", "lightning", "mpi4py"}))
"""


def test_help_lists_the_commands_and_neither_it_nor_planning_imports_torch(tmp_path):
    path = tmp_path / "profile.json"
    write_profile(profile(*several()), path)
    command = [sys.executable, "-c", CODE, str(path)]
    result = subprocess.run(command, env=clean_env(), capture_output=True, text=True, timeout=240)
    assert result.stdout.splitlines()[-1] == "0 0 []", result.stderr
    for name in dispatcher.COMMANDS:
        assert f"\n  {name} " in result.stdout


@pytest.mark.parametrize("words", [[], ["beach"], ["--bench"]])
def test_no_command_or_an_unknown_one_ends_with_2(words, capsys):
    with pytest.raises(SystemExit) as end:
        dispatcher.main(words)
    assert end.value.code == 2
    assert "COMMAND" in capsys.readouterr().err
