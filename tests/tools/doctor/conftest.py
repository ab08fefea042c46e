import pytest

from tests.tools.doctor.planting import own_environment


@pytest.fixture
def environment(tmp_path):
    return own_environment(tmp_path / "venv")
