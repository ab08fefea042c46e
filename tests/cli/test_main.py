"""The dispatcher: what `lightning-ring` lists is there, and listing it imports none of it."""

import importlib.util
import subprocess
import sys

import pytest

from lightning_ring.cli import main as dispatcher
from tests.processes import clean_env


def test_every_listed_command_is_there():
    for name, what in dispatcher.COMMANDS.items():
        assert importlib.util.find_spec(f"lightning_ring.cli.{name}") is not None
        assert what


def test_help_lists_the_commands_and_imports_none_of_them():
    code = (
        "import sys; from lightning_ring.cli.main import main\ntry: main(['--help'])\nexcept "
        "SystemExit as end: print(end.code, sorted(sys.modules.keys() & {'torch', 'lightning', "
        "'mpi4py'}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=clean_env(), capture_output=True, text=True, timeout=240
    )
    assert result.stdout.splitlines()[-1] == "0 []", result.stderr
    for name in dispatcher.COMMANDS:
        assert f"\n  {name} " in result.stdout


@pytest.mark.parametrize("words", [[], ["beach"], ["--bench"]])
def test_no_command_or_an_unknown_one_ends_with_2(words, capsys):
    with pytest.raises(SystemExit) as end:
        dispatcher.main(words)
    assert end.value.code == 2
    assert "COMMAND" in capsys.readouterr().err
