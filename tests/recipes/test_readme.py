"""README and guides: the commands that they give run, and their tables list every argument and
error.
"""

import dataclasses
import re

import pytest
from hydra import compose, initialize_config_dir

import lightning_ring.errors
from lightning_ring.options import RingOptions
from tests import forked
from tests.processes import ROOT, run

DOCS = ROOT / "docs"


def commands(page):
    """The shell blocks of ``page``, each command on a line of its own."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [block.replace("\\\n", "") for block in blocks]


README = (ROOT / "README.md").read_text()
SCRIPTS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
COMMANDS = [block for block in commands(ROOT / "README.md") if "venv .venv" in block]
RECIPES = [
    line
    for page in sorted(DOCS.glob("**/*.md"))
    for block in commands(page)
    for line in re.findall(r"^(?:.* )?python recipes/train\.py([^#\n]*)", block, re.MULTILINE)
]


def test_quick_start_has_two_commands_of_one_line_of_which_ci_runs_the_tests():
    assert [command.count("\n") for command in COMMANDS] == [1, 1]
    assert "recipes/train.py" in COMMANDS[0]
    assert "pytest" in COMMANDS[1]
    assert COMMANDS[1].strip() in (ROOT / ".ci" / "run").read_text().replace("\\\n", "")


@pytest.mark.ranks
def test_readmes_script_of_large_batches_runs(tmp_path):
    # `tests/test_release.py` runs the first script
    (tmp_path / "script.py").write_text(SCRIPTS[1])
    done = run(["env", "-C", str(tmp_path), *forked.python(), "script.py"], **forked.ranks())
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("line", RECIPES)
def test_recipe_commands_compose(line):
    overrides = [word.partition(",")[0] for word in line.split() if not word.startswith("-")]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        assert compose("train", overrides=overrides).name


def test_argument_table_is_the_strategys():
    table = (
        (DOCS / "reference" / "strategy.md").read_text().split("## Arguments")[1].split("\n#")[0]
    )
    documented = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(documented) == sorted(field.name for field in dataclasses.fields(RingOptions))


def test_every_error_is_explained():
    errors = [
        name for name, value in vars(lightning_ring.errors).items() if isinstance(value, type)
    ]
    guide = (DOCS / "guides" / "troubleshooting.md").read_text()
    assert [name for name in errors if f"`{name}`" not in guide] == []
