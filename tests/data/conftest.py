import pytest

from lightning_ring.data import ImageFolder
from tests.images import write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return ImageFolder(write_folder(tmp_path_factory.mktemp("images")))
