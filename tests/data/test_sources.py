"""Images of other libraries' formats: with every sampler, resumed exactly, on other numbers of
ranks; their errors.
"""

import runpy
import shutil
import sys

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset
from torchvision.datasets import ImageFolder as TorchvisionFolder

from lightning_ring.data import (
    CenterCrop,
    HuggingFaceImages,
    LanceImages,
    MapStyleImages,
    Mixture,
    MixtureSampler,
    RandomResizedCrop,
    ShuffledSampler,
    image_loader,
)
from lightning_ring.data.decoding import decode_rgb
from lightning_ring.data.packing.image import PackSettings
from lightning_ring.errors import ConfigurationError, SampleError, ShardLostError
from tests.data.packing.packed import pack
from tests.data.photos import encode, photo
from tests.processes import ROOT

CROP = RandomResizedCrop(16, exact=True)  # the pixels of a whole image, whatever it is decoded by
SAMPLERS = {
    "shuffled": lambda photos: ShuffledSampler(len(photos)),
    "mixture": lambda photos: MixtureSampler(photos.sizes, [1], num_samples=40),
}


def table_of(folder):
    labels = [folder.classes[label] for label in folder.labels]
    images = [folder.read(i) for i in range(len(folder))]
    return pa.table({"image": images, "label": labels, "number": range(len(folder))})


def lance_images(folder, root):
    return LanceImages(
        lance.write_dataset(table_of(folder), root / "photos.lance", max_rows_per_file=8)
    )


def parquet_images(folder, root):
    import datasets  # deferred: it takes 1.5 s of each process that collects tests

    pq.write_table(table_of(folder), root / "photos.parquet")
    return HuggingFaceImages(
        datasets.Dataset.from_parquet(str(root / "photos.parquet"), cache_dir=str(root / "cache"))
    )


def hugging_face_images(folder, root):
    """Images that are kept as paths."""
    paths = [str(folder.root / folder.name(i)) for i in range(len(folder))]
    return HuggingFaceImages(data_set_of(folder, paths))


def data_set_of(folder, images):
    import datasets

    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=folder.classes)}
    columns = {"image": images, "label": folder.labels.tolist()}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))


def torchvision_images(folder, root):
    return MapStyleImages(TorchvisionFolder(str(folder.root)))


SOURCES = {
    "lance": lance_images,
    "parquet": parquet_images,
    "hugging face": hugging_face_images,
    "torchvision": torchvision_images,
}


@pytest.fixture(params=SOURCES)
def opened(request, folder, tmp_path):
    """Opens the images anew."""

    def open_them():
        shutil.rmtree(tmp_path / "photos.lance", ignore_errors=True)
        return SOURCES[request.param](folder, tmp_path)

    return open_them


def loader(photos, kind):
    sampler = SAMPLERS[kind](photos)
    return image_loader(
        photos, sampler, 12, crop=CROP, transform=None, with_indices=True, num_threads=2
    )


@pytest.mark.parametrize("kind", SAMPLERS)
def test_images_are_those_of_the_files_and_trainings_go_on_exactly(folder, opened, kind):
    photos = opened()
    assert photos.classes == folder.classes
    np.testing.assert_array_equal(photos.labels, folder.labels)

    def load(images):
        return loader(Mixture([images]) if kind == "mixture" else images, kind)

    began, resumed = load(photos), load(photos)
    iterator = iter(began)
    head = [next(iterator)]
    resumed.load_state_dict(began.state_dict())
    iterator.close()
    for batch, other in zip(head + list(resumed), load(folder), strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(batch, other, strict=True))


def test_a_source_that_is_opened_again_is_the_same_one(folder, tmp_path):
    for kind, opens in SOURCES.items():
        if kind != "lance":  # a data set that is written again is another one
            assert opens(folder, tmp_path).fingerprint == opens(folder, tmp_path).fingerprint
    lance_images(folder, tmp_path)
    shutil.copytree(tmp_path / "photos.lance", tmp_path / "copy.lance")
    prints = {
        LanceImages(lance.dataset(tmp_path / name)).fingerprint
        for name in ("photos.lance", "copy.lance")
    }
    assert len(prints) == 1


# -- Lance


def test_lance_stays_at_its_version_while_the_data_set_grows_and_shrinks(folder, tmp_path):
    photos = lance_images(folder, tmp_path)
    whole = [photos.read_many(range(len(photos)))]
    state = loader(photos, "shuffled").state_dict()
    grown = lance.write_dataset(
        table_of(folder).slice(0, 5), tmp_path / "photos.lance", mode="append"
    )
    grown.delete("number in (1, 9)")
    grown.optimize.compact_files()
    assert [photos.read_many(range(len(photos)))] == whole
    newest = LanceImages(lance.dataset(tmp_path / "photos.lance"))
    left = [i for i in [*range(len(folder)), *range(5)] if i not in (1, 9)]
    assert newest.read_many([*range(len(newest)), 3, 3]) == [
        whole[0][i] for i in [*left, left[3], left[3]]
    ]
    assert newest.labels.tolist() == folder.labels[left].tolist()
    with pytest.raises(
        ConfigurationError, match=r"saved over the images 'version 1, .* reads 'version \d, "
    ):
        loader(newest, "shuffled").load_state_dict(state)
    loader(
        LanceImages(lance.dataset(tmp_path / "photos.lance", version=1)), "shuffled"
    ).load_state_dict(state)
    shutil.rmtree(tmp_path / "photos.lance" / "data")
    with pytest.raises(ShardLostError, match=r"photos\.lance, version 1, cannot be read"):
        list(loader(photos, "shuffled"))


def test_lance_filters_rows_and_numbers_classes_as_it_is_told(folder, tmp_path):
    photos = lance_images(folder, tmp_path).dataset
    photos.delete("number = 2")
    photos = lance.dataset(tmp_path / "photos.lance")
    some = LanceImages(photos, where="number % 2 = 0 and label != 'c1'", classes=["c2", "c1", "c0"])
    kept = [i for i in range(len(folder)) if i % 2 == 0 and i != 2 and folder.labels[i] != 1]
    assert some.read_many(range(len(some))) == [folder.read(i) for i in kept]
    assert some.labels.tolist() == [2 - folder.labels[i] for i in kept]
    assert some.fingerprint != LanceImages(photos, classes=["c2", "c1", "c0"]).fingerprint
    assert f"row {kept[1] - 1} of " in some.where(1)  # one row before it was deleted


def test_what_lance_images_cannot_be_made_of_says_why(folder, tmp_path):
    photos = lance_images(folder, tmp_path).dataset
    no_column = r"with the columns image, label, number, cannot be read with image='picture'"
    refused = [
        ({"image": "picture"}, no_column),
        ({"image": "number"}, r"the column 'number' is of int64 , expected binary"),
        ({"where": "wide > 3"}, r"cannot be read with .*, where='wide > 3': "),
        ({"where": "number"}, r"where='number' is int64, expected a condition"),
        ({"where": "number > 100"}, r"has shape \(0,\), expected one label for each of one image"),
        ({"classes": ["c0", "c1"]}, r"1 classes that are not in classes=\[.*, such as 'c2'"),
    ]
    for options, message in refused:
        with pytest.raises(ConfigurationError, match=message):
            LanceImages(photos, **options)
    blobs = pa.schema(
        [
            pa.field("image", pa.large_binary(), metadata={"lance-encoding:blob": "true"}),
            ("label", "int64"),
        ]
    )
    for columns, schema, message in [
        ({"image": [b"x"], "label": [0]}, blobs, "not stored as blobs"),
        ({"image": [b"x", b"y"], "label": [None, 1]}, None, "'label' has no label for 1 of 2"),
        ({"image": [b"x"], "label": [0.5]}, None, r"has the label 0\.5, expected a whole number"),
    ]:
        path = tmp_path / f"{message[:5]}.lance"
        with pytest.raises(ConfigurationError, match=message):
            LanceImages(lance.write_dataset(pa.table(columns, schema), path))
    table = pa.table({"image": [b"x"] * 3, "label": pa.array(["a", "b", "c"]).dictionary_encode()})
    some = LanceImages(
        lance.write_dataset(table, tmp_path / "codes.lance"),
        where="label != 'b'",
        classes=["c", "a"],
    )
    assert some.labels.tolist() == [1, 0]


# -- Hugging Face


def test_a_selected_and_shuffled_data_set_is_read_in_its_order(folder, tmp_path):
    whole = hugging_face_images(folder, tmp_path)
    images = [{"bytes": folder.read(i)} for i in range(len(folder))]
    data = data_set_of(folder, images).with_format("torch")
    shuffled = HuggingFaceImages(data.shuffle(seed=3).select(range(9)))
    order = data.shuffle(seed=3)._indices["indices"].to_pylist()[:9]
    assert shuffled.read_many(range(9)) == [folder.read(i) for i in order]
    assert shuffled.labels.tolist() == folder.labels[order].tolist()
    assert shuffled.fingerprint != whole.fingerprint == HuggingFaceImages(data).fingerprint


def test_what_hugging_face_images_cannot_be_made_of_says_why(folder, tmp_path):
    import datasets

    data = datasets.Dataset.from_dict({"image": [1, 2], "label": [-1, 0], "text": ["a", "b"]})
    unlabelled = datasets.Dataset.from_dict({"image": [encode(photo())] * 2, "label": [-1, 0]})
    for given, message in [
        (
            data.to_iterable_dataset(),
            "got IterableDataset, expected a datasets.Dataset: one split, not streamed",
        ),
        (data, r"the column 'image' is Value\(.*, expected images"),
        (
            data.rename_column("image", "picture"),
            r"the columns picture, label, text, expected 'image' among them",
        ),
        (unlabelled, r"has labels from -1 to 0, expected numbers of classes, from 0"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            HuggingFaceImages(given)
    paths = datasets.Dataset.from_dict({"image": [str(tmp_path / "gone.jpg")] * 2, "label": [0, 1]})
    with pytest.raises(OSError, match=r"gone\.jpg"):
        HuggingFaceImages(paths)


# -- any torch data set


class Given:
    """A torch data set of what it is given."""

    def __init__(self, *images):
        self.images = images
        self.targets = torch.zeros(len(images), dtype=torch.int64)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        if isinstance(self.images[i], Exception):
            raise self.images[i]
        return self.images[i], 0


def test_images_of_every_kind_are_the_same(folder):
    array = decode_rgb(folder.read(0))
    tensor = torch.from_numpy(array).permute(2, 0, 1)
    photos = MapStyleImages(Given(folder.read(0), tensor, array, Image.fromarray(array)))
    in_order = ShuffledSampler(4, shuffle=False)
    crop = CenterCrop(16, resize=20, exact=True)
    ((images, labels),) = image_loader(
        photos, in_order, 4, crop=crop, transform=None, num_threads=1
    )
    assert labels.tolist() == [0] * 4
    assert all(torch.equal(image, images[0]) for image in images)
    sixteen = MapStyleImages(Given(Image.fromarray(np.full((4, 4), 65535, np.uint16))))
    assert np.asarray(sixteen.read_many([0])[0]).min() == 255


def test_what_a_torch_data_set_gives_that_is_no_image_says_so(folder):
    for image, message in [
        (
            torch.zeros(3, 4, 4),
            r"image 0 of Given is torch\.float32 \(3, 4, 4\), expected an image of Pillow",
        ),
        (7, r"image 0 of Given is int \(\), expected"),
        (KeyError("there"), r"image 0 of Given cannot be had: KeyError\('there'\)"),
    ]:
        with pytest.raises(SampleError, match=message):
            list(loader(MapStyleImages(Given(image)), "shuffled"))
    half = MapStyleImages(Given(folder.read(0), KeyError("there"), folder.read(0)))
    skipping = image_loader(half, ShuffledSampler(3), 3, crop=CROP, transform=None, on_error="skip")
    assert [len(images) for images, _ in skipping] == [3]
    assert list(skipping.maker.skipped) == [1]
    part = Subset(TorchvisionFolder(str(folder.root)), [4, 2])
    with pytest.raises(
        ConfigurationError, match=r"Subset has 2 images and no targets\. Give a label for each"
    ):
        MapStyleImages(part)
    labelled = MapStyleImages(
        part, [part.dataset.targets[i] for i in part.indices], classes=folder.classes
    )
    assert (labelled.labels.tolist(), labelled.classes) == (
        folder.labels[[4, 2]].tolist(),
        folder.classes,
    )
    with pytest.raises(ConfigurationError, match="2 images and 1 labels"):
        MapStyleImages(part, [0])


def test_the_example_of_the_guide_runs(folder, tmp_path, monkeypatch, capsys):
    pack(folder.root, tmp_path / "shards", PackSettings())
    example = ROOT / "docs" / "examples" / "lance_photos.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example), "shards", str(folder.root)])
    runpy.run_path(str(example), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [lines[0], *lines[-2:]] == ["21 images", "40 images", "21 images in version 1"]
