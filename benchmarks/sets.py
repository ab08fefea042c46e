"""How long changes of a set of very many images take, filters over it, and the search for hashes that are alike.

``python benchmarks/sets.py [--images 2000000]`` writes an index of that many images (their shards are empty files of
the right length) to a temporary folder, and changes it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from index import write_index

from lightning_ring.data.sets.change import delete_images, relabel_images
from lightning_ring.data.sets.near import near_pairs
from lightning_ring.data.shards.columns import Column
from lightning_ring.data.shards.expressions import matching
from lightning_ring.data.shards.index import ShardIndex
from lightning_ring.data.shards.manifest import MANIFEST, file_sha256, read_manifest


def add_stamps(root: Path, images: int) -> None:
    """The column that only packing reads."""
    manifest = read_manifest(root)
    np.save(root / manifest.index / "stamps.npy", np.zeros(images, "<u8"))
    manifest.files[f"{manifest.index}/stamps.npy"] = file_sha256(root / manifest.index / "stamps.npy")
    (root / MANIFEST).write_text(manifest.to_json())


def timed(what: str, work: Callable[[], object]) -> None:
    began = time.perf_counter()
    work()
    print(f"{what:50} {time.perf_counter() - began:7.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=2_000_000)
    images = parser.parse_args().images
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_index(root, images, 10_000)
        add_stamps(root, images)
        print(json.dumps({"images": images}))
        index = ShardIndex(root, read_manifest(root))
        classes = read_manifest(root).classes
        timed("filter: label < 100 and bytes > 9000", lambda: matching("label < 100 and bytes > 9000", index, classes))
        timed(
            "filter: startswith(class_name, 'class 77')",
            lambda: matching("startswith(class_name, 'class 77')", index, classes),
        )
        timed("filter: endswith(name, '8.jpg')", lambda: matching("endswith(name, '8.jpg')", index, classes))
        notes = tuple(f"note {i}" for i in range(images))
        index.metadata["note"] = Column("text", np.arange(images, dtype=np.int32), None, notes)
        timed("filter: endswith(note, '8'), a text an image", lambda: matching("endswith(note, '8')", index, classes))
        timed("relabel 1 % of the images", lambda: relabel_images(root, where="label < 100", to="class 7"))
        timed("delete 1 % of the images", lambda: delete_images(root, where="label >= 9900"))
        hashes = np.random.default_rng(0).integers(0, 2**64, images, dtype=np.uint64)
        timed("near_pairs, 4 bits", lambda: sum(len(pairs[0]) for pairs in near_pairs(hashes, 4)))


if __name__ == "__main__":
    main()
