"""Images per CPU-second of the loader, beside those of torchvision, webdataset and DALI.

    pip install 'lightning-ring[lance,hugging-face,recipes]' webdataset nvidia-dali-cuda120
    python -m benchmarks.data.loader

RandomResizedCrop 224 and flip of JPEGs of 341 x 256 pixels, which it draws itself (the same every
time) and keeps in ``--folder``. CPU time is that of this process and its workers, by the kernel's
count. Workers persist: they start in an epoch that is not counted, and the counted epochs run in
turns. The table gives medians with the lowest and the highest. Loaders are compared that deliver
the same: uint8, which a GPU normalises by itself, or float32, normalised on this CPU. webdataset
reads the same JPEGs and decodes and crops them as torchvision's folder does ("torchvision v2"), and
also with our decoder. DALI decodes and crops by itself, on the CPU. What is not installed is left
out, and the benchmark says so.
"""

import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter
from torch.utils.data import DataLoader, default_collate

from benchmarks.turns import parser_of
from lightning_ring.data import (
    DeviceTransform,
    HuggingFaceImages,
    ImageFolder,
    LanceImages,
    MapStyleImages,
    RandomResizedCrop,
    ShardDataset,
    ShuffledSampler,
    image_loader,
)
from lightning_ring.data.loading.transforms import decode_into
from lightning_ring.data.packing.image import PackSettings
from lightning_ring.data.packing.run import pack

BATCH = 64
CROP = RandomResizedCrop()
CLASSES = 10
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def draw(seed):
    """Soft light, hard-edged objects, fine texture and sensor noise: some 30 kB at quality 90,
    as a photo has.
    """
    generator = np.random.default_rng(seed)
    light = Image.fromarray((generator.random((5, 7, 3)) * 255).astype(np.uint8))
    image = light.resize((341, 256), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(image)
    for _ in range(12):
        x, y, w, h = (int(v) for v in generator.integers(0, (300, 220, 120, 120)))
        color = tuple(int(v) for v in generator.integers(0, 255, 3))
        shape = pen.ellipse if generator.random() < 0.5 else pen.rectangle
        shape((x, y, x + w, y + h), fill=color)
    image = image.filter(ImageFilter.GaussianBlur(0.7))
    pixels = np.asarray(image).astype(np.float32)
    cells = Image.fromarray((generator.random((64, 85)) * 255).astype(np.uint8))
    texture = np.asarray(cells.resize((341, 256), Image.Resampling.BICUBIC))
    pixels += (texture[..., None] - 127.0) * 0.25 + generator.normal(0, 2.5, pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def make_images(root, num):
    """``root/images/CLASS/n.jpg``, packed to ``root/shards``."""

    def write(i):
        path = root / "images" / f"c{i % CLASSES}/{i:06d}.jpg"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            draw(i).save(path, quality=90)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, range(num)))
    pack(root / "images", root / "shards", PackSettings(shard_mb=1), 2, lambda *_: None)


def ours(source, workers, transform):
    sampler = ShuffledSampler(len(source), rank=0, world_size=1)
    return image_loader(
        source, sampler, BATCH, crop=RandomResizedCrop(), transform=transform, num_threads=workers
    )


def encoded_columns(root):
    """What `ours, shards` reads, as columns."""
    source = ShardDataset(root / "shards", decode=False)
    return {"image": source.read_many(range(len(source))), "label": source.labels}


def our_lance(root, workers, transform):
    import lance
    import pyarrow

    folder = root / "photos.lance"
    if not folder.exists():
        lance.write_dataset(pyarrow.table(encoded_columns(root)), folder)
    return ours(LanceImages(lance.dataset(folder)), workers, transform)


def our_parquet(root, workers, transform):
    import datasets
    import pyarrow.parquet

    file = root / "photos.parquet"
    if not file.exists():
        pyarrow.parquet.write_table(pyarrow.table(encoded_columns(root)), file, row_group_size=100)
    data = datasets.Dataset.from_parquet(str(file), cache_dir=str(root / "parquet"))
    return ours(HuggingFaceImages(data), workers, transform)


def our_map_style(root, workers, transform):
    from torchvision.datasets import ImageFolder as Folder

    return ours(MapStyleImages(Folder(str(root / "images"))), workers, transform)


@lru_cache
def transform_of(kind):
    """torchvision's, from a Pillow image to ``kind``."""
    from torchvision.transforms import v2

    steps = [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip(), v2.ToImage()]
    if kind == "float32":
        steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    return v2.Compose(steps)


def workers_of(data, workers, **options):
    return DataLoader(data, num_workers=workers, persistent_workers=True, **options)


def torchvision_folder(root, workers, kind):
    from torchvision.datasets import ImageFolder as Folder

    data = Folder(root / "images", transform_of(kind))
    return workers_of(data, workers, batch_size=BATCH, shuffle=True)


def our_decoder(data):
    out = torch.empty(1, 224, 224, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
    decode_into(out, data, CROP, np.random.random(CROP.num_uniforms).tolist())
    return out[0]


def as_torchvision(data, kind):
    return transform_of(kind)(Image.open(BytesIO(data)).convert("RGB"))


def webdataset_tar(root, workers, decode):
    import webdataset

    def sample(item):
        return decode(item["jpg"]), int(item["cls"])

    files = [str(path) for path in sorted((root / "shards").glob("*.tar"))]
    data = webdataset.WebDataset(files, shardshuffle=False).shuffle(256).map(sample)
    data = data.batched(BATCH, collation_fn=default_collate)
    return workers_of(data, workers, batch_size=None)


def dali_folder(root, workers, kind):
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    @pipeline_def(batch_size=BATCH, num_threads=workers, device_id=None)
    def pipeline():
        folder = str(root / "images")
        encoded, labels = fn.readers.file(file_root=folder, random_shuffle=True, name="files")
        images = fn.decoders.image_random_crop(encoded, device="cpu", random_area=[0.08, 1.0])
        images = fn.resize(images, size=[224, 224], antialias=True)
        dtype, mean, std = types.UINT8, [0.0] * 3, [1.0] * 3
        if kind == "float32":
            dtype, mean, std = types.FLOAT, [255 * m for m in MEAN], [255 * s for s in STD]
        crops = {"dtype": dtype, "mean": mean, "std": std, "mirror": fn.random.coin_flip()}
        return fn.crop_mirror_normalize(images, **crops), labels

    partial_last = LastBatchPolicy.PARTIAL
    batches = DALIGenericIterator(
        [pipeline()], ["images", "labels"], reader_name="files", last_batch_policy=partial_last
    )

    class Pairs:
        def __iter__(self):
            yield from ((batch[0]["images"], batch[0]["labels"]) for batch in batches)
            batches.reset()

    return Pairs()


def cpu_seconds():
    """Of this process and its living descendants. Workers persist, so none has ended."""
    return time.process_time() + sum(map(_used, _descendants(os.getpid())))


def _descendants(pid):
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            yield child
            yield from _descendants(child)


def _used(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(loader):
    """Images per CPU-second of one epoch."""
    cpu, num = cpu_seconds(), 0
    for images, *_ in loader:
        num += len(images)
    return num / (cpu_seconds() - cpu)


def candidates(root, workers):
    """Loaders by what they deliver and their names; the first of each is what the others are
    compared with.
    """
    folder, shards = ImageFolder(root / "images"), ShardDataset(root / "shards")
    found = {}
    for kind, transform in (("uint8", None), ("float32", DeviceTransform(MEAN, STD))):
        theirs, mine = (root, workers, kind), (root, workers, transform)
        decoded = partial(as_torchvision, kind=kind)
        found[kind] = {
            "ImageFolder, torchvision v2": partial(torchvision_folder, *theirs),
            "webdataset, torchvision v2": partial(webdataset_tar, root, workers, decoded),
            "DALI on the CPU, image folder": partial(dali_folder, *theirs),
            "ours, image folder": partial(ours, folder, workers, transform),
            "ours, shards": partial(ours, shards, workers, transform),
            "ours, Lance": partial(our_lance, *mine),
            "ours, Hugging Face, Parquet": partial(our_parquet, *mine),
            "ours, torchvision's ImageFolder": partial(our_map_style, *mine),
        }
    found["uint8"]["webdataset, our decoder"] = partial(webdataset_tar, root, workers, our_decoder)
    return found


def main():
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--images", type=int, default=2000)
    add("--rounds", type=int, default=3)
    add("--workers", type=int, default=2, help="threads of ours, worker processes of the others")
    default = Path(tempfile.gettempdir()) / "lightning_ring_benchmark_images"
    add("--folder", type=Path, default=default, help="of the images (default: %(default)s)")
    asked = parser.parse_args()
    root, workers = asked.folder / str(asked.images), asked.workers
    if not (root / "shards" / "manifest.json").exists():
        make_images(root, asked.images)
    torch.set_num_threads(1)
    print(f"{asked.images} images, batches of {BATCH}, {workers} workers, {asked.rounds} rounds")
    for kind, makers in candidates(root, workers).items():
        loaders = {}
        for name, make in makers.items():
            try:
                loaders[name] = make()
                measure(loaders[name])  # starts the workers and warms the page cache
            except ImportError as error:
                loaders.pop(name, None)
                print(f"left out: {name}: {error}")
        results = {name: [] for name in loaders}
        for _ in range(asked.rounds):
            for name, loader in loaders.items():
                results[name].append(measure(loader))
        report(kind, results)


def report(kind, results):
    columns = "images per CPU-second | lowest to highest | x the first"
    print(f"\n| {kind} | {columns} |\n| --- | --- | --- | --- |")
    first = statistics.median(next(iter(results.values())))
    for name, rounds in results.items():
        middle, span = statistics.median(rounds), f"{min(rounds):.0f} to {max(rounds):.0f}"
        print(f"| {name} | {middle:.0f} | {span} | {middle / first:.2f} |")


if __name__ == "__main__":
    main()
