"""A folder of images of every kind, and what is packed of it."""

import os

import pytest

from tests.data.packing.packed import pack
from tests.data.photos import encode, image_folder, photo


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    root = image_folder(tmp_path_factory.mktemp("images") / "src", classes=3, images=12)
    (root / "class 1" / "broken.jpg").write_bytes(encode(photo())[:700])
    (root / "class 1" / "text.jpg").write_text("some words")
    (root / "class 2" / "cmyk.jpg").write_bytes(encode(photo(77).convert("CMYK")))
    (root / "empty").mkdir()
    with open(os.fsencode(str(root / "class 2")) + b"/line\nfeed \xff.jpg", "wb") as file:
        file.write(encode(photo(78, 30, 24)))
    return root


@pytest.fixture(scope="module")
def packed(source, tmp_path_factory):
    target = tmp_path_factory.mktemp("packed") / "dst"
    pack(source, target)
    return target
