"""`ImageFolder` is torchvision's, and shards hold what it holds."""

import numpy as np
import pytest
from PIL import Image

from lightning_ring.data import ImageFolder, ShardDataset
from lightning_ring.data.decoding import decode_rgb
from lightning_ring.data.packing.image import PackSettings
from tests.data.packing.packed import pack
from tests.images import picture, write_folder
from tests.refusals import refused


def test_image_folder_has_torchvisions_order(folder, tmp_path, caplog):
    datasets = pytest.importorskip("torchvision.datasets")
    theirs = datasets.ImageFolder(folder.root)
    assert [(folder.where(i), int(folder.labels[i])) for i in range(len(folder))] == theirs.samples
    assert folder.classes == theirs.classes
    assert np.array_equal(
        decode_rgb(folder.read(9)), np.asarray(theirs.loader(theirs.samples[9][0]))
    )
    root = write_folder(tmp_path / "odd", classes=2, images=1)
    (root / "empty").mkdir()
    (root / "c0" / "notes.txt").write_text("x")
    odd = ImageFolder(root)
    assert odd.classes == ["c0", "c1", "empty"]
    assert "found 1 classes without images: empty" in caplog.text
    assert (
        "left out 1 files and folders that are not images of a class: c0/notes.txt" in caplog.text
    )
    Image.new("RGB", (4, 4)).save(root / "c1" / "more.png")
    assert ImageFolder(root).fingerprint != odd.fingerprint
    with refused("holds no images"):
        ImageFolder(root / "empty")
    with refused("is not a folder"):
        ImageFolder(root / "gone")


@pytest.mark.parametrize("size", [0, 20])
def test_folders_shards_and_torchvision_agree_on_empty_classes_and_on_exif(tmp_path, size):
    datasets = pytest.importorskip("torchvision.datasets")
    root = write_folder(tmp_path / "src", classes=4, images=1, size=(20, 33))
    (root / "c1" / "0.jpg").unlink()
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    Image.fromarray(picture(5, 20, 33)).save(root / "c2" / "0.jpg", exif=exif)
    expected = datasets.ImageFolder(root, allow_empty=True)
    folder = ImageFolder(root)
    manifest = pack(root, tmp_path / "dst", PackSettings(size, group_by_class=True))
    shards = ShardDataset(tmp_path / "dst")
    assert manifest.counts["not turned"] == 1
    for ours in (folder, shards):
        assert ours.classes == expected.classes
        assert ours.labels.tolist() == expected.targets == [0, 2, 3]
        for i, (path, _) in enumerate(expected.samples):
            assert np.array_equal(decode_rgb(ours.read(i)), np.asarray(expected.loader(path)))
    upright = PackSettings(size, upright=True, group_by_class=True)
    assert pack(root, tmp_path / "upright", upright).counts["turned"] == 1
    assert ShardDataset(tmp_path / "upright")[1][0].shape == (3, 33, 20)
