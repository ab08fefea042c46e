"""Images per CPU-second of the loader, beside ImageFolder with torchvision and beside webdataset.

    pip install 'lightning-ring[data,recipes,bench]'
    python benchmarks/loader.py

RandomResizedCrop 224 and flip of JPEGs of 341 x 256 pixels, which it draws itself (the same every time) and keeps in
``--folder``. CPU time is that of this process and its workers, by the kernel's count. Rounds are interleaved; the table
gives medians. "uint8": what a GPU is given, which normalises by itself. "float32": normalised on this CPU.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter

from lightning_ring.data import (
    DeviceTransform,
    ImageFolder,
    RandomResizedCrop,
    ShardDataset,
    ShuffledSampler,
    image_loader,
)
from lightning_ring.data.loading.pixels import decode_into
from lightning_ring.data.packing.run import pack
from lightning_ring.data.packing.settings import PackSettings

BATCH = 64
CLASSES = 10
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def draw(seed: int) -> Image.Image:
    """Soft light, hard-edged objects, fine texture and sensor noise: some 30 kB at quality 90, as a photo has."""
    generator = np.random.default_rng(seed)
    light = Image.fromarray((generator.random((5, 7, 3)) * 255).astype(np.uint8))
    image = light.resize((341, 256), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(image)
    for _ in range(12):
        x, y, w, h = (int(v) for v in generator.integers(0, (300, 220, 120, 120)))
        color = tuple(int(v) for v in generator.integers(0, 255, 3))
        (pen.ellipse if generator.random() < 0.5 else pen.rectangle)((x, y, x + w, y + h), fill=color)
    image = image.filter(ImageFilter.GaussianBlur(0.7))
    pixels = np.asarray(image).astype(np.float32)
    texture = np.asarray(
        Image.fromarray((generator.random((64, 85)) * 255).astype(np.uint8)).resize(
            (341, 256), Image.Resampling.BICUBIC
        )
    )
    pixels += (texture[..., None] - 127.0) * 0.25 + generator.normal(0, 2.5, pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def make_images(root: Path, num: int) -> None:
    """``root/images/CLASS/n.jpg``, packed to ``root/shards``."""

    def write(i: int) -> None:
        path = root / "images" / f"c{i % CLASSES}/{i:06d}.jpg"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            draw(i).save(path, quality=90)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, range(num)))
    pack(root / "images", root / "shards", PackSettings(shard_mb=1), 2, lambda done, total, left_out: None)


def ours(source: ImageFolder | ShardDataset, workers: int, transform: DeviceTransform | None) -> Iterable[Any]:
    sampler = ShuffledSampler(len(source), rank=0, world_size=1)
    return image_loader(source, sampler, BATCH, crop=RandomResizedCrop(), transform=transform, num_threads=workers)


def torchvision_folder(root: Path, workers: int) -> Iterable[Any]:
    from torchvision.datasets import ImageFolder as Folder
    from torchvision.transforms import v2

    transform = v2.Compose(
        [
            v2.RandomResizedCrop(224, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )
    data = Folder(root / "images", transform)
    return torch.utils.data.DataLoader(data, BATCH, shuffle=True, num_workers=workers)


def webdataset_tar(root: Path, workers: int) -> Iterable[Any]:
    """The decoder and the crop are ours; the reading, the shuffling, the batching and the workers are webdataset's."""
    import webdataset

    crop = RandomResizedCrop()

    def decode(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
        out = torch.empty(1, 224, 224, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
        numbers = np.random.random(crop.num_uniforms).tolist()
        decode_into(out, sample["jpg"], crop, numbers)
        return out[0], int(sample["cls"])

    data = webdataset.WebDataset([str(path) for path in sorted((root / "shards").glob("*.tar"))], shardshuffle=False)
    data = data.shuffle(256).map(decode).batched(BATCH, collation_fn=torch.utils.data.default_collate)
    return torch.utils.data.DataLoader(data, batch_size=None, num_workers=workers)


def cpu_seconds() -> float:
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def measure(make: Callable[[], Iterable[Any]]) -> tuple[float, float]:
    """Images per CPU-second and per second of one epoch; workers start and end within it."""
    loader = make()
    cpu, wall, num = cpu_seconds(), time.perf_counter(), 0
    for images, *_ in loader:
        num += len(images)
    del loader
    return num / (cpu_seconds() - cpu), num / (time.perf_counter() - wall)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="threads of ours, worker processes of the others")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "lightning_ring_benchmark_images")
    parser.add_argument("--only-make", action="store_true", help="draw the images and end")
    arguments = parser.parse_args()
    root, workers = arguments.folder / str(arguments.images), arguments.workers
    if not (root / "shards" / "manifest.json").exists():
        make_images(root, arguments.images)
    if arguments.only_make:
        return
    torch.set_num_threads(1)
    folder, shards = ImageFolder(root / "images"), ShardDataset(root / "shards")
    candidates: dict[str, Callable[[], Iterable[Any]]] = {
        "ImageFolder, torchvision v2, DataLoader, float32": lambda: torchvision_folder(root, workers),
        "webdataset, our decoder, DataLoader, uint8": lambda: webdataset_tar(root, workers),
        "ours, image folder, uint8": lambda: ours(folder, workers, None),
        "ours, shards, uint8": lambda: ours(shards, workers, None),
        "ours, shards, float32": lambda: ours(shards, workers, DeviceTransform(MEAN, STD)),
    }
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    for turn in range(arguments.rounds + 1):
        for name, make in candidates.items():
            result = measure(make)
            if turn:  # the first round warms the page cache
                results[name].append(result)
    medians = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in results.items()
    }
    peer, web = list(medians.values())[:2]
    print(f"{arguments.images} images, batches of {BATCH}, {workers} threads or workers, {arguments.rounds} rounds")
    print("| loader | images per CPU-second | images per second | x ImageFolder | x webdataset |")
    print("| --- | --- | --- | --- | --- |")
    for name, (cpu, wall) in medians.items():
        print(f"| {name} | {cpu:.0f} | {wall:.0f} | {cpu / peer[0]:.2f} | {cpu / web[0]:.2f} |")


if __name__ == "__main__":
    main()
