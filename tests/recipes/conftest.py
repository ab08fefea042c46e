import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict

import recipes.train  # noqa: F401  (registers the resolvers that the configuration uses)
from tests.processes import ROOT


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


@pytest.fixture(scope="session")
def catalogue(tmp_path_factory):
    """Where the first test that needs it draws the tiny catalogue."""
    return f"data.folder={tmp_path_factory.mktemp('data') / 'catalogue'}"
