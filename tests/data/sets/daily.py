"""A folder of images that grows, and the set that is made of it."""

from __future__ import annotations

from pathlib import Path

from lightning_ring.data import ShardDataset
from lightning_ring.data.packing.job import PackJob
from lightning_ring.data.packing.run import run_job
from lightning_ring.data.packing.settings import PackSettings
from lightning_ring.data.shards.manifest import Manifest
from tests.data.photos import encode, photo

SETTINGS = PackSettings(size=40, shard_mb=16 / 1024)  # some four images a shard


def draw(folder: Path, names: dict[str, int]) -> Path:
    """A picture for each name, drawn from its seed."""
    for name, seed in names.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(photo(seed, 40, 30)))
    return folder


def pack(source, target, append=True, progress=lambda *numbers: None, **options) -> Manifest:
    manifest = run_job(PackJob(Path(source), Path(target), SETTINGS, append=append, **options), 2, progress)
    assert manifest is not None
    return manifest


def images_of(root: Path, **options) -> dict[str, tuple[str, bytes]]:
    """Class and bytes of every image, by name."""
    dataset = ShardDataset(root, decode=False, **options)
    assert len({dataset.name(i) for i in range(len(dataset))}) == len(dataset)
    return {dataset.name(i): (dataset.classes[dataset.labels[i]], dataset.read(i)) for i in range(len(dataset))}


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
