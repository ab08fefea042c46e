"""How the tests of packing pack."""

from pathlib import Path

import pytest

from lightning_ring.data import shards
from lightning_ring.data.packing import run
from lightning_ring.data.packing.image import PackSettings

SETTINGS = PackSettings(size=40, shard_mb=16 / 1024)  # 16 KiB: a few images a shard


class Stop(Exception):
    pass


def pack(source, target, settings=SETTINGS, workers=2, progress=lambda *_: None, append=False):
    return run.pack(Path(source), Path(target), settings, workers, progress, append=append)


def pack_until(number, source, target, settings=SETTINGS, **options):
    """Stop when ``number`` images are packed."""

    def progress(done, total, left_out):
        if done == number:
            raise Stop

    with pytest.raises(Stop):
        pack(source, target, settings, progress=progress, **options)


def verify(root):
    return shards.verify(root, 2, lambda done, total: None)


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
