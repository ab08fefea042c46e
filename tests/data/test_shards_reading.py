"""Packed shards, read by ShardDataset, by webdataset and by tar."""

import mmap
import os
import pickle
import random
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from torch.utils.data import DataLoader

from lightning_ring.data import ShardDataset
from lightning_ring.data.packing.image import PackSettings
from lightning_ring.data.shards import ShardIndex, read_manifest
from lightning_ring.errors import ShardError
from tests.data.packing.packed import pack
from tests.data.photos import encode, image_folder, photo


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    root = tmp_path_factory.mktemp("shards")
    source = image_folder(root / "src", classes=3, images=20)
    (source / "class 0" / "small.png").write_bytes(encode(photo(9, 20, 20), "PNG"))
    pack(source, root / "dst")
    return root / "dst"


def sample_of(dataset, i):
    return dataset.read(i), int(dataset.labels[i])


def test_webdataset_reads_the_same(packed):
    dataset = ShardDataset(packed, decode=False)
    urls = sorted(str(path) for path in packed.glob("*.tar"))
    assert len(urls) > 2
    samples = list(webdataset.WebDataset(urls, shardshuffle=False))
    assert [sample["__key__"] for sample in samples] == [f"{i:09d}" for i in range(len(dataset))]
    for i, sample in enumerate(samples):
        image = sample["jpg"] if "jpg" in sample else sample["png"]
        assert (image, int(sample["cls"])) == dataset[i]


def test_tar_lists_and_extracts_the_same(packed, tmp_path):
    dataset = ShardDataset(packed)
    listed = []
    for shard in sorted(packed.glob("*.tar")):
        result = subprocess.run(["tar", "tf", shard], capture_output=True, text=True, check=True)
        assert result.stderr == ""
        listed += result.stdout.split()
        subprocess.run(["tar", "xf", shard, "-C", tmp_path], check=True)
    assert listed[::2] == [
        f"{i:09d}.{'png' if 'png' in dataset.name(i) else 'jpg'}" for i in range(len(dataset))
    ]
    assert listed[1::2] == [f"{i:09d}.cls" for i in range(len(dataset))]
    for i, name in enumerate(listed[::2]):
        assert (tmp_path / name).read_bytes() == dataset.read(i)
        assert (tmp_path / listed[2 * i + 1]).read_text() == str(dataset.labels[i])


def test_it_is_a_map_style_data_set(packed):
    dataset = ShardDataset(packed)
    n = len(dataset)
    assert n == 61
    image, label = dataset[np.int64(5)]
    assert (image.dtype, image.shape[0], type(label)) == (torch.uint8, 3, int)
    assert torch.equal(image, dataset[5][0])
    assert torch.equal(dataset[torch.tensor(5)][0], dataset[5 - n][0])
    for wrong in (n, -n - 1):
        with pytest.raises(IndexError):
            dataset[wrong]
    with pytest.raises(TypeError):
        dataset[1.0]


def test_batches_come_in_the_order_asked_for(packed):
    dataset = ShardDataset(packed, decode=False)
    indices = [60, 0, 33, 33, -1, 12]
    assert dataset.__getitems__(indices) == [dataset[i] for i in indices]
    assert dataset.read_many(indices) == [dataset.read(i) for i in indices]


def test_transform_gets_the_tensor_or_the_bytes(packed):
    assert ShardDataset(packed, lambda image: image.float().mean())[3][0].ndim == 0
    assert ShardDataset(packed, len, decode=False)[3][0] == len(ShardDataset(packed).read(3))


def test_a_loader_with_forked_workers_gives_every_image_once(packed):
    dataset = ShardDataset(packed, decode=False)
    dataset.read(0)  # so that forked workers inherit an open file
    expected = [sample_of(dataset, i) for i in range(len(dataset))]
    for workers, context in ((0, None), (2, "fork")):
        loader = DataLoader(
            dataset,
            batch_size=7,
            num_workers=workers,
            multiprocessing_context=context,
            timeout=120 * bool(workers),
            collate_fn=list,
        )
        assert [sample for batch in loader for sample in batch] == expected


def test_it_travels_as_a_path_with_labels_that_were_set(packed):
    dataset = ShardDataset(packed, decode=False)
    dataset.read(0)
    assert len(pickle.dumps(dataset)) < 1500
    dataset.labels = dataset.labels + 10
    dataset.classes = [*dataset.classes, "more"]
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy[7] == dataset[7]
    assert copy[0][1] == dataset[0][1] >= 10
    for name in ("classes", "fingerprint"):
        assert getattr(copy, name) == getattr(dataset, name)


def test_a_data_set_that_was_packed_anew_is_not_taken_for_the_old_one(packed, tmp_path):
    source = image_folder(tmp_path / "src", classes=1, images=3)
    pack(source, tmp_path / "dst", PackSettings())
    data = pickle.dumps(ShardDataset(tmp_path / "dst"))
    (tmp_path / "dst").rename(tmp_path / "old")
    (tmp_path / "dst").symlink_to(packed)
    with pytest.raises(ShardError, match="was packed anew"):
        pickle.loads(data)


def test_the_index_is_mapped_and_takes_24_bytes_an_image(packed):
    dataset = ShardDataset(packed)
    base = dataset.labels
    while isinstance(base, np.ndarray):
        base = base.base
    assert isinstance(base, mmap.mmap)
    assert not dataset.labels.flags.writeable
    index = ShardIndex(packed, read_manifest(packed))
    columns = [index.column(name) for name in ("labels", "places", "name_ends")]
    assert sum(column.nbytes for column in columns) == 24 * len(dataset)


@pytest.mark.parametrize("max_open", [1, 2, None])
def test_threads_share_the_files(packed, max_open, monkeypatch):
    if max_open:
        monkeypatch.setattr(f"{ShardIndex.__module__}.most_open_files", lambda: 8 * max_open)
    dataset = ShardDataset(packed)
    expected = [dataset.read(i) for i in range(len(dataset))]
    order = random.Random(0).choices(range(len(dataset)), k=4000)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(dataset.read, order)) == [expected[i] for i in order]
    assert dataset._files._file.cache_info().currsize <= (max_open or 100)


def open_descriptors():
    return {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()}


def test_files_open_when_needed_and_close_with_the_data_set(packed):
    dataset = ShardDataset(packed)
    assert not any(name.endswith(".tar") for name in open_descriptors())
    dataset.read(0)
    assert str(packed / "shard-000000.tar") in open_descriptors()
    del dataset
    assert not any(name.endswith(".tar") for name in open_descriptors())
