import sys

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict

import recipes.train  # noqa: F401  (registers the resolvers that the configuration uses)
from tests import forked
from tests.processes import ROOT, run

TYPED = """
import atexit, runpy, sys

atexit.register(lambda: print("torch in the parent:", "torch" in sys.modules))
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")  # the ranks run this file, not the present one
"""


@pytest.fixture
def composed(tmp_path):
    """Composes the configuration as `hydra.main` does, with ``tmp_path`` as the run's folder."""

    def build(*overrides):
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            config = compose("train", overrides=list(overrides), return_hydra_config=True)
        with open_dict(config):
            config.hydra.runtime.output_dir = str(tmp_path)
            HydraConfig.instance().set_config(config)
            del config.hydra
        return config

    yield build
    HydraConfig.instance().cfg = None


@pytest.fixture
def typed(tmp_path_factory, tmp_path, monkeypatch):
    """Runs the recipe in ``tmp_path`` with the given overrides; its last line says whether the
    typed process imported torch.
    """
    monkeypatch.chdir(tmp_path)
    script = tmp_path_factory.mktemp("typed") / "typed.py"
    script.write_text(TYPED)
    train = str(ROOT / "recipes" / "train.py")
    return lambda *words, **env: run(
        [sys.executable, str(script), train, *words], **(forked.ranks() | env)
    )


@pytest.fixture(scope="session")
def catalogue(tmp_path_factory):
    """Where the first test that needs it draws the tiny catalogue."""
    return f"data.folder={tmp_path_factory.mktemp('data') / 'catalogue'}"
