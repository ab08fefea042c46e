"""Images per second of the loader with transforms of samples, in threads and in processes.

python -m benchmarks.data.augment
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor
from torchvision.transforms import v2

from benchmarks.data.loader import draw
from lightning_ring.data import ImageFolder, RandomResizedCrop, ShuffledSampler, image_loader


def loops_in_python(image: Tensor) -> Tensor:
    """Holds the interpreter for some milliseconds."""
    sum(number * number for number in range(50_000))
    return image


WAYS: dict[str, dict[str, Any]] = {
    "no transform": {},
    "RandAugment, threads": {"sample_transform": v2.RandAugment()},
    "RandAugment, processes": {"sample_transform": v2.RandAugment(), "in_processes": True},
    "a loop in Python, threads": {"sample_transform": loops_in_python},
    "a loop in Python, processes": {"sample_transform": loops_in_python, "in_processes": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        (Path(folder) / "class").mkdir()
        for number in range(arguments.images):
            draw(number).save(Path(folder) / "class" / f"{number}.jpg", quality=90)
        source = ImageFolder(folder)
        loaders = {
            name: image_loader(
                source,
                ShuffledSampler(len(source), rank=0, world_size=1),
                64,
                crop=RandomResizedCrop(224),
                transform=None,
                num_threads=arguments.threads,
                **way,
            )
            for name, way in WAYS.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in loaders}
        for turn in range(arguments.rounds + 1):  # the first one warms up
            for name, loader in loaders.items():
                began = time.perf_counter()
                for _ in loader:
                    pass
                if turn:
                    seconds[name].append(time.perf_counter() - began)
    for name, spent in seconds.items():
        rates = sorted(arguments.images / duration for duration in spent)
        print(
            f"{name:30} {statistics.median(rates):6.0f} images/s ({rates[0]:.0f} to "
            f"{rates[-1]:.0f})"
        )


if __name__ == "__main__":
    main()
