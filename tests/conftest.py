from __future__ import annotations

import pytest

from tests.battery import Battery


@pytest.fixture(scope="session")
def battery(tmp_path_factory: pytest.TempPathFactory) -> Battery:
    return Battery(tmp_path_factory.mktemp("battery"))
