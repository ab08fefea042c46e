"""How long the index of very many images takes to open, and how much memory processes take that
share it.

``python -m benchmarks.data.index [--images 20000000] [--processes 4]`` writes an index of that many
images (their shards are empty files of the right length) to a temporary folder, 1 GiB for 20
million, and reads it in new processes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from lightning_ring.data.shards.index import BLOCK, COLUMNS, NAMES
from lightning_ring.data.shards.manifest import MANIFEST, Manifest, Shard, file_sha256

IMAGE_BYTES = 12_000  # a 256-pixel JPEG
READS = 200_000


def write_index(root: Path, images: int, classes: int, shard_images: int = 20_000) -> int:
    """Write the index to ``root``; its bytes."""
    rng = np.random.default_rng(0)
    index = root / Manifest([], [], {}, "", "", {}, {}).index
    index.mkdir(parents=True)
    sizes = rng.integers(IMAGE_BYTES // 2, IMAGE_BYTES * 3 // 2, images).astype(np.uint32)
    # in blocks, with both headers, the label and its padding
    lengths = 4 + -(-sizes.astype(np.int64) // BLOCK)
    blocks = np.empty(images, np.uint32)
    shards = []
    for number, start in enumerate(range(0, images, shard_images)):
        ends = np.cumsum(lengths[start : start + shard_images])
        blocks[start : start + shard_images] = 1 + ends - lengths[start : start + shard_images]
        shards.append(
            Shard(f"shard-{number:06d}.tar", int(ends[-1] + 2) * BLOCK, len(ends), "0" * 64)
        )
        with open(root / shards[-1].name, "wb") as file:
            file.truncate(shards[-1].bytes)
    name = b"class 123/photo 12345678.jpg\n"
    with open(index / NAMES, "wb") as file:
        for start in range(0, images, 100_000):
            file.write(name * min(100_000, images - start))
    columns = {
        "labels": rng.integers(0, classes, images),
        "places": np.stack([blocks, sizes, np.zeros(images, np.uint32)], axis=1),
        "name_ends": np.arange(1, images + 1, dtype=np.int64) * len(name) - 1,
    }
    for column, values in columns.items():
        np.save(index / f"{column}.npy", values.astype(COLUMNS[column][0]))
    files = {
        f"{index.relative_to(root)}/{path.name}": file_sha256(path) for path in index.iterdir()
    }
    manifest = Manifest([f"class {i}" for i in range(classes)], shards, files, "", "", {}, {})
    (root / MANIFEST).write_text(manifest.to_json())
    return sum((index / f"{column}.npy").stat().st_size for column in columns)


def memory(name: str) -> float:
    """MiB of this process by the name in /proc/self/smaps_rollup: Rss, Pss (shared pages
    divided), Private_Dirty.
    """
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def read_index(root: Path) -> None:
    """One process: open, look up images at random, read all labels; prints what that took as
    JSON.
    """
    from lightning_ring.data import ShardDataset

    before = {name: memory(name) for name in ("Rss", "Pss")}
    start = time.perf_counter()
    dataset = ShardDataset(root)
    opened = time.perf_counter() - start
    after_open = memory("Rss") - before["Rss"]
    order = np.random.default_rng(1).integers(0, len(dataset), READS).tolist()
    start = time.perf_counter()
    for i in order:
        dataset._index.place(i)
    looked_up = (time.perf_counter() - start) / READS
    assert dataset.name(len(dataset) - 1).endswith("photo 12345678.jpg")
    counts = np.bincount(dataset.labels, minlength=len(dataset.classes))
    assert counts.sum() == len(dataset)
    print(
        json.dumps({"open_ms": opened * 1e3, "lookup_us": looked_up * 1e6, "open_mib": after_open}),
        flush=True,
    )
    sys.stdin.readline()  # until all processes have read everything
    print(
        json.dumps({"rss": memory("Rss") - before["Rss"], "pss": memory("Pss") - before["Pss"]}),
        flush=True,
    )
    sys.stdin.readline()


def start_reader(root: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.data.index", "--read", str(root)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(readers: list[subprocess.Popen[str]], word: str) -> list[dict[str, float]]:
    """The next line of every reader, which then goes on."""
    answers = []
    for reader in readers:
        assert reader.stdin is not None
        assert reader.stdout is not None
        if word:
            reader.stdin.write(word)
            reader.stdin.flush()
        answers.append(json.loads(reader.stdout.readline()))
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=20_000_000)
    parser.add_argument("--classes", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        read_index(options.read)
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "shards"
        size = write_index(root, options.images, options.classes)
        shards = len(list(root.glob("*.tar")))
        print(f"{options.images:,} images in {shards} shards: index of {size / 1e6:.0f} MB")
        readers: list[subprocess.Popen[str]] = []
        for _ in range(options.processes):  # one after the other: opening is timed
            readers.append(start_reader(root))
            (first,) = ask(readers[-1:], "")
            print(
                "open {open_ms:.1f} ms (+{open_mib:.1f} MiB), a lookup {lookup_us:.2f} µs".format(
                    **first
                )
            )
        shares = ask(readers, "\n")
        print(
            f"all have looked up {READS:,} images and read all labels; added to each process, "
            "in MiB:"
        )
        for share in shares:
            print("  resident {rss:.0f}, its share of it {pss:.0f}".format(**share))
        print(f"  together {sum(share['pss'] for share in shares):.0f}")
        for reader in readers:
            reader.communicate("\n", timeout=60)


if __name__ == "__main__":
    main()
