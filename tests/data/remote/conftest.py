"""A set, and an HTTP server of its shards that delays, fails and lies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_ring.data import Remote, ShardDataset
from lightning_ring.data.packing import run
from lightning_ring.data.packing.settings import PackSettings
from tests.data.photos import image_folder
from tests.data.remote.faulty_server import Server, serve


@pytest.fixture(scope="module", autouse=True)
def _needs_the_extra() -> None:
    pytest.importorskip("aiohttp", reason="the extra `remote` is not installed")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shards")
    source = image_folder(root / "src", classes=3, images=80)
    run.pack(source, root / "dst", PackSettings(size=40, shard_mb=60 / 1024), 2, lambda *numbers: None)
    return root / "dst"


@pytest.fixture(scope="module")
def everything(packed: Path) -> list[bytes]:
    dataset = ShardDataset(packed)
    return dataset.read_many(range(len(dataset)))


@pytest.fixture(scope="module")
def running(packed: Path) -> Iterator[Server]:
    with serve(packed) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Server:
    running.plant()
    return running


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote(cache=tmp_path / "cache", deadline=4)
