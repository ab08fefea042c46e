"""``recipes.data.shards``: classes are compared by name, between folders and with a checkpoint."""

import shutil
from types import SimpleNamespace

import lightning as L
import pytest
from PIL import Image

from lightning_ring.cli.pack import main
from lightning_ring.data import ShardDataset
from lightning_ring.data.packing.image import PackSettings
from recipes.data.shards import Shards
from tests.data.packing.packed import pack
from tests.refusals import refused
from tests.trainers import quiet_trainer


def photos(root, classes):
    for name in classes:
        (root / name).mkdir(parents=True)
        Image.new("RGB", (8, 8), (ord(name), 0, 0)).save(root / name / "0.png")
    return root


def shards(folder, classes, num_classes, stage="fit", batch_size=1, **options):
    for split in ("train", "val"):
        source = photos(folder / f"images {split}", classes)
        pack(source, folder / split, PackSettings())
    data = Shards(str(folder), batch_size, num_classes=num_classes, **options)
    data.setup(stage)
    return data


def labels_by_name(data, split):
    dataset = data.datasets[split]
    return {dataset.name(i)[0]: int(dataset.labels[i]) for i in range(len(dataset))}


def test_a_checkpoint_gives_classes_the_numbers_that_it_was_trained_with(tmp_path):
    state = shards(tmp_path / "trained", "bcd", 3).state_dict()
    fewer = shards(tmp_path / "fewer", "bd", 3, "test")
    fewer.load_state_dict(state)
    assert labels_by_name(fewer, "val") == {"b": 0, "d": 2}
    assert fewer.class_names == ["b", "c", "d"]


@pytest.mark.parametrize(
    ("classes", "strange"), [("abcd", "'a'"), ("acd", r"'a'\. It has no 'b': was a class renamed")]
)
def test_a_class_that_the_checkpoint_has_not_is_an_error(tmp_path, classes, strange):
    state = shards(tmp_path / "trained", "bcd", 3).state_dict()
    other = shards(tmp_path / "other", classes, 3, "test")
    with refused(f"1 classes besides the 3 that the checkpoint .*{strange}"):
        other.load_state_dict(state)


def test_a_training_goes_on_without_the_images_that_were_appended_since(tmp_path):
    data = shards(tmp_path / "set", "bcd", 3)
    state = data.state_dict()
    (tmp_path / "set" / "images train" / "b" / "1.png").write_bytes(
        (tmp_path / "set/images train/c/0.png").read_bytes()
    )
    source, train = tmp_path / "set" / "images train", tmp_path / "set" / "train"
    assert pack(source, train, PackSettings(), append=True).samples == 4
    for stage, images in (("fit", 3), ("test", 4)):
        later = Shards(str(tmp_path / "set"), 1, num_classes=3)
        later.trainer = SimpleNamespace(state=SimpleNamespace(fn=stage))
        later.setup(stage)
        later.load_state_dict(state)
        assert len(later.datasets["train"]) == images


def test_packed_numbers_can_be_given(tmp_path):
    source = photos(tmp_path / "src", "bd")
    (tmp_path / "classes.txt").write_text("d\nc\nb\n")
    assert (
        main([str(source), str(tmp_path / "dst"), "--classes", str(tmp_path / "classes.txt")]) == 0
    )
    shutil.copytree(source, tmp_path / "more" / "src")
    manifest = str(tmp_path / "dst" / "manifest.json")
    assert (
        main([str(tmp_path / "more" / "src"), str(tmp_path / "again"), "--classes", manifest]) == 0
    )
    for folder in ("dst", "again"):
        dataset = ShardDataset(tmp_path / folder)
        assert dataset.classes == ["d", "c", "b"]
        assert {dataset.name(i)[0]: int(dataset.labels[i]) for i in range(2)} == {"b": 2, "d": 0}
    (tmp_path / "classes.txt").write_text("d\n")
    with refused(r"classes that --classes does not list: 'b' \(1 of 2\)"):
        main([str(source), str(tmp_path / "third"), "--classes", str(tmp_path / "classes.txt")])


def test_too_few_images_for_a_step_or_for_the_ranks(tmp_path, monkeypatch):
    data = shards(tmp_path, "bcd", 3, batch_size=4, sampler="balanced")
    with refused("more than the 3 images"):
        data.train_dataloader()
    data = shards(tmp_path / "pxk", "bcd", 3, batch_size=8, sampler="pxk", images_per_class=2)
    with refused(r"takes 4 classes a step.*have 3.* data.batch_size=6 or data"):
        data.train_dataloader()
    monkeypatch.setattr(data, "world_size", lambda: 4)
    with refused("cannot be evaluated on 4 ranks"):
        data.val_dataloader()


class Noting(L.LightningModule):
    """Notes the labels of its test; trains nothing."""

    def training_step(self, batch, batch_idx):
        return None

    def on_test_start(self):
        self.labels = []

    def test_step(self, batch, batch_idx):
        self.labels += batch[1].tolist()

    def configure_optimizers(self):
        return None


def test_a_trainer_tests_by_the_names_of_the_checkpoint(tmp_path):
    trainer, module = quiet_trainer(max_epochs=1, limit_val_batches=0), Noting()
    trainer.fit(module, shards(tmp_path / "trained", "bcd", 3))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    # d is number 1 in the second folder, and 2 in the checkpoint
    data = shards(tmp_path / "other", "bd", 3, "test")
    quiet_trainer().test(module, data, ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert sorted(module.labels) == [0, 2]
