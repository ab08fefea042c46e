import pytest

from tests.elastic.serving import serving


@pytest.fixture
def server():
    with serving() as server:
        yield server
