"""A set of images in Lance, from packed images to a training: ``python lance_photos.py SHARDS
NEW_PHOTOS``.
"""

import sys

# --8<-- [start:write]
import lance
import pyarrow as pa

from lightning_ring.data import (
    ImageFolder,
    LanceImages,
    RandomResizedCrop,
    ShardDataset,
    ShuffledSampler,
    image_loader,
)

SCHEMA = pa.schema({"image": pa.binary(), "label": pa.string(), "name": pa.string()})


def batches(photos, size=1000):
    """Images of a ShardDataset or an ImageFolder, so many in memory at a time."""
    for start in range(0, len(photos), size):
        rows = range(start, min(start + size, len(photos)))
        labels = [photos.classes[photos.labels[i]] for i in rows]
        names = [photos.name(i) for i in rows]
        yield pa.record_batch([photos.read_many(rows), labels, names], schema=SCHEMA)


def write(shards: str) -> None:
    lance.write_dataset(
        batches(ShardDataset(shards)), "photos.lance", schema=SCHEMA, mode="overwrite"
    )


# --8<-- [end:write]


# --8<-- [start:change]
def change(new_photos: str) -> None:
    lance.write_dataset(
        batches(ImageFolder(new_photos)), "photos.lance", schema=SCHEMA, mode="append"
    )
    photos = lance.dataset("photos.lance")
    photos.delete("label = 'c1' AND name LIKE '%/0.jpg'")
    photos.update({"label": "'c0'"}, where="label = 'c2'")
    photos.optimize.compact_files()  # small files become large ones, without the deleted rows
    for version in photos.versions():
        print(
            version["version"],
            version["timestamp"],
            f"{photos.checkout_version(version['version']).count_rows()} rows",
        )


# --8<-- [end:change]


# --8<-- [start:train]
def loader(version=None):
    photos = LanceImages(lance.dataset("photos.lance", version=version), where="label != 'c9'")
    sampler = ShuffledSampler(len(photos), fingerprint=photos.fingerprint)
    return image_loader(photos, sampler, 64, crop=RandomResizedCrop(224), transform=None)


# --8<-- [end:train]


if __name__ == "__main__":
    write(sys.argv[1])
    print(sum(len(images) for images, _ in loader()), "images")
    change(sys.argv[2])
    print(sum(len(images) for images, _ in loader()), "images")
    print(sum(len(images) for images, _ in loader(version=1)), "images in version 1")
