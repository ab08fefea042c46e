"""Images per second from a local folder, and from a server that takes 20 ms for each request.

    pip install 'lightning-ring[data,remote]'
    python benchmarks/remote.py

The images of `benchmarks/loader.py`, packed, in random order through `image_loader`. The server is another process of
this machine. A training takes the batches: it sleeps for the time of a step and so leaves the cores to the loader. Ways
of reading take turns; the table gives medians, with the lowest and the highest.

    local       ShardDataset(folder)
    warm        from the server, everything is in the cache
    cold        from the server, the cache is empty; it can hold all
    too large   from the server, the cache is empty and holds half: each image is a request of its own
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.loader import BATCH, make_images
from lightning_ring.data import RandomResizedCrop, Remote, ShardDataset, ShuffledSampler, image_loader
from tests.data.remote.faulty_server import serve


def _serve(folder: Path, delay: float, pipe: Any) -> None:
    with serve(folder) as server:
        server.plant(delay=delay)
        pipe.send(server.url)
        pipe.recv()


def measure(dataset: ShardDataset, threads: int, step: float) -> tuple[float, float]:
    """Images per second of an epoch, and its processor seconds for 1,000 images."""
    sampler = ShuffledSampler(len(dataset), rank=0, world_size=1)
    loader = image_loader(dataset, sampler, BATCH, crop=RandomResizedCrop(), transform=None, num_threads=threads)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in loader:
        time.sleep(step)
    return len(dataset) / (time.perf_counter() - wall), (time.process_time() - cpu) / len(dataset) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--delay", type=float, default=0.02, help="seconds of each request")
    parser.add_argument("--step", type=float, default=0.15, help="seconds that the training takes for a batch")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "lightning_ring_benchmark_images")
    arguments = parser.parse_args()
    root = arguments.folder / str(arguments.images)
    if not (root / "shards" / "manifest.json").exists():
        make_images(root, arguments.images)
    torch.set_num_threads(1)
    size = sum(path.stat().st_size for path in (root / "shards").glob("*.tar"))
    pipe, other = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(root / "shards", arguments.delay, other), daemon=True
    )
    server.start()
    url = pipe.recv()
    results: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:

        def opened(cache: str, part: float) -> ShardDataset:
            dataset = ShardDataset(url, remote=Remote(cache=Path(scratch) / cache, cache_gb=part * size / 2**30))
            dataset.name(0)
            return dataset

        measure(opened("warm", 2), arguments.threads, 0)
        for turn in range(arguments.rounds):
            for name, dataset in (
                ("local", ShardDataset(root / "shards")),
                ("warm", opened("warm", 2)),
                ("cold", opened(f"cold {turn}", 2)),
                ("too large", opened(f"small {turn}", 0.5)),
            ):
                results.setdefault(name, []).append(measure(dataset, arguments.threads, arguments.step))
            for folder in Path(scratch).glob(f"* {turn}"):
                shutil.rmtree(folder)
    pipe.send("end")
    server.join()
    print(
        f"{arguments.images} images, {size / 2**20:.0f} MiB, batches of {BATCH}, {arguments.threads} threads, "
        f"{arguments.delay * 1000:.0f} ms a request, {arguments.step * 1000:.0f} ms a step, {arguments.rounds} rounds"
    )
    print("\n| | images per second | lowest to highest | of local | processor ms an image |")
    print("| --- | --- | --- | --- | --- |")
    first = statistics.median(rate for rate, _ in results["local"])
    for name, rounds in results.items():
        rates, cpu = zip(*rounds, strict=True)
        middle = statistics.median(rates)
        span = f"{min(rates):.0f} to {max(rates):.0f}"
        print(f"| {name} | {middle:.0f} | {span} | {middle / first:.1%} | {statistics.median(cpu):.2f} |")


if __name__ == "__main__":
    main()
