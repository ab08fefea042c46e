"""Delete, relabel, merge, prune, and what `lightning-ring ls` and `stat` say of a set."""

from __future__ import annotations

import csv
import io
import json
import os
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest

from lightning_ring.cli.main import main
from lightning_ring.data import ShardDataset
from lightning_ring.data.packing.shard_writer import shard_name
from lightning_ring.data.sets import merge
from lightning_ring.data.sets.change import annotate_images, delete_images, relabel_images
from lightning_ring.data.sets.merge import merge_sets
from lightning_ring.data.sets.prune import prune_set
from lightning_ring.data.shards.manifest import generations, read_manifest
from lightning_ring.data.shards.verify import verify
from lightning_ring.errors import ConfigurationError, ShardError
from tests.data.sets.daily import draw, files_of, images_of, pack

NAMES = {f"{kind}/{i}.jpg": 10 * i + len(kind) for kind in ("bird", "cat", "horse") for i in range(7)}


@pytest.fixture
def target(tmp_path):
    pack(draw(tmp_path / "src", NAMES), tmp_path / "dst")
    return tmp_path / "dst"


def test_every_subset_that_is_deleted_leaves_the_others_as_they_are(target):
    random = np.random.default_rng(0)
    for _ in range(4):
        before = images_of(target)
        gone = random.choice(sorted(before), 4, replace=False).tolist()
        generation = delete_images(target, names=gone).generation
        assert images_of(target) == {name: image for name, image in before.items() if name not in gone}
        assert images_of(target, generation=generation - 1) == before
        assert verify(target, 1, lambda *numbers: None) == []
    dataset = ShardDataset(target, decode=False)
    for i in range(len(dataset)):  # the names in the tars are those of the packing
        place = dataset._index.place(i)
        with tarfile.open(dataset._files.path(place.shard)) as tar:
            assert tar.extractfile(dataset.key(i) + ".jpg").read() == dataset.read(i)


def test_deleting_what_is_not_there_is_an_error_or_nothing(target):
    before = files_of(target)
    with pytest.raises(ConfigurationError, match=r"the set has no image 'no', 'neither'\. Expected names as"):
        delete_images(target, names=["cat/1.jpg", "no", "neither"])
    assert delete_images(target, where="class_name == 'dog'").generation == 0
    with pytest.raises(ConfigurationError, match="no image would be left"):
        delete_images(target, where="label >= 0")
    assert files_of(target).keys() == before.keys()
    assert delete_images(target, names=["cat/1.jpg"]).generation == 1
    assert delete_images(target, names=["cat/1.jpg"]).generation == 1


def test_relabelling_changes_labels_alone(target):
    before = images_of(target)
    relabel_images(target, {"cat/1.jpg": "bird", "bird/2.jpg": "horse"})
    relabel_images(target, where="class_name == 'horse' and name != 'bird/2.jpg'", to="pony", new_classes=True)
    found = images_of(target)
    assert {name: data for name, (_, data) in found.items()} == {name: data for name, (_, data) in before.items()}
    expected = {name: kind.replace("horse", "pony") for name, (kind, _) in before.items()}
    assert {name: kind for name, (kind, _) in found.items()} == expected | {"cat/1.jpg": "bird", "bird/2.jpg": "horse"}
    manifest = read_manifest(target)
    assert manifest.classes == ["bird", "cat", "horse", "pony"]
    assert manifest.change == "relabel 7 images"
    places = [target / f"index/{g:06d}/places.npy" for g in (0, 2)]
    assert places[0].stat().st_ino == places[1].stat().st_ino  # a link: nothing else was written
    assert relabel_images(target, {"cat/1.jpg": "bird"}).generation == 2
    with pytest.raises(ConfigurationError, match=r"has no class 'Birds'. Expected one of its 4 classes.*--new-classes"):
        relabel_images(target, {"cat/1.jpg": "Birds"})
    with pytest.raises(ConfigurationError, match="two classes of one name"):
        relabel_images(target, {"cat/1.jpg": "Bird"}, new_classes=True)
    for wrong in (
        {"labels": {"cat/1.jpg": "bird"}, "where": "label == 0", "to": "cat"},
        {"where": "label == 0"},
        {"labels": {"cat/1.jpg": "bird"}, "to": "cat"},
        {},
    ):
        with pytest.raises(ConfigurationError, match="expected either"):
            relabel_images(target, **wrong)


def test_a_merged_set_has_the_images_of_all(target, tmp_path):
    other = tmp_path / "other"
    pack(draw(tmp_path / "src2", {"ant/0.jpg": 1, "cat/a.jpg": 2, "cat/b.jpg": 3}), other)
    delete_images(target, where="class_name == 'bird'")
    annotate_images(other, {"width": {"ant/0.jpg": 7}, "tags": {"ant/0.jpg": ["x"], "cat/b.jpg": ["y", "x"]}})
    annotate_images(target, {"tags": {"cat/1.jpg": ["x", "z"], "horse/2.jpg": ["y"]}})
    for folders, into in (([target, other], "new"), ([other], "dst")):
        merged = merge_sets(folders, tmp_path / into)
        assert images_of(tmp_path / into) == {
            **{name: (name.split("/")[0], (tmp_path / "src" / name).read_bytes()) for name in NAMES if name[0] != "b"},
            **{name: (name.split("/")[0], (tmp_path / "src2" / name).read_bytes()) for name in images_of(other)},
        }
        assert merged.classes == ["bird", "cat", "horse", "ant"]
        assert verify(tmp_path / into, 1, lambda *numbers: None) == []
        wide = ShardDataset(tmp_path / into, where="width == 7")
        assert [wide.name(i) for i in range(len(wide))] == ["ant/0.jpg"]
        tagged = ShardDataset(tmp_path / into, where="len(tags) > 0")
        assert {tagged.name(i): tagged.metadata["tags"][i] for i in range(len(tagged))} == {
            "ant/0.jpg": ["x"],
            "cat/b.jpg": ["y", "x"],
            "cat/1.jpg": ["x", "z"],
            "horse/2.jpg": ["y"],
        }
    assert merge_sets([other], target).generation == merged.generation  # they are there already
    relabel_images(other, {"cat/b.jpg": "ant"})
    delete_images(target, names=["cat/a.jpg"])
    for folders, into in (([other], target), ([other, target], tmp_path / "third")):
        with pytest.raises(
            ConfigurationError, match=r"both have an image 'cat/b\.jpg', with another class .*--prefixes"
        ):
            merge_sets(folders, into)
    assert not list((tmp_path / "third").glob("*"))
    relabel_images(other, {"cat/b.jpg": "cat"})
    merge_sets([other], target)
    assert "cat/a.jpg" not in images_of(target)  # it stays deleted
    merge_sets([other], target, prefixes=True)
    assert images_of(target)["other/ant/0.jpg"] == images_of(other)["ant/0.jpg"]
    with pytest.raises(ConfigurationError, match="named twice"):
        merge_sets([other, other], tmp_path / "third")
    with pytest.raises(ConfigurationError, match="holds 'ant' and no set"):
        merge_sets([other], tmp_path / "src2")


def test_a_merged_set_remembers_what_was_deleted_from_its_sources(target, tmp_path):
    delete_images(target, names=["cat/1.jpg", "cat/2.jpg"])
    pack(draw(tmp_path / "src2", {"cat/2.jpg": 2, "cat/b.jpg": 3}), tmp_path / "other")
    for prefixes, name in ((False, "cat/1.jpg"), (True, "dst/cat/1.jpg")):
        new = tmp_path / f"new {prefixes}"
        merge_sets([target, tmp_path / "other"], new, prefixes)
        assert ("cat/2.jpg" in images_of(new)) is not prefixes  # of the other source
        options = {"prefix": "dst/"} if prefixes else {}
        pack(draw(tmp_path / "src", {"cat/new.jpg": 5}), new, keep_known=True, **options)
        assert name not in images_of(new)
        assert name.replace("1", "new") in images_of(new)


def test_a_merge_that_adds_no_image_remembers_what_was_deleted(target, tmp_path):
    some, other = {"cat/1.jpg": 1, "cat/b.jpg": 3}, tmp_path / "other"
    pack(draw(tmp_path / "src2", some | {"cat/gone.jpg": 4}), other)
    delete_images(other, names=["cat/gone.jpg"])
    pack(draw(tmp_path / "src3", some), tmp_path / "new")
    merged = merge_sets([other], tmp_path / "new")
    assert (merged.generation, merged.samples) == (1, 2)
    assert merge_sets([other], tmp_path / "new").generation == 1  # it knows that now
    pack(tmp_path / "src2", tmp_path / "new", keep_known=True)
    assert set(images_of(tmp_path / "new")) == set(some)


def test_nothing_is_left_of_a_merge_that_fails(target, tmp_path):
    other = tmp_path / "other"
    pack(draw(tmp_path / "src2", {f"ant/{i}.jpg": i for i in range(12)}), other)
    blocked = target / shard_name(read_manifest(target).free_shard + 1)
    blocked.mkdir()  # one shard is linked before it
    before = files_of(target)
    with pytest.raises(OSError, match=blocked.name):
        merge_sets([other], target)
    assert files_of(target) == before
    blocked.rmdir()
    merge_sets([other], target)
    assert len(images_of(target)) == len(NAMES) + 12


def test_shards_that_are_links_are_merged(target, tmp_path):
    away = tmp_path / "away"
    away.mkdir()
    for path in [*target.glob("*.tar"), *target.glob("index/*/labels.npy")]:
        moved = path.rename(away / path.name)
        path.symlink_to(os.path.relpath(moved, path.parent))
    merge_sets([target], tmp_path / "deep" / "er" / "new")
    assert images_of(tmp_path / "deep" / "er" / "new") == images_of(target)
    delete_images(tmp_path / "deep" / "er" / "new", names=["cat/1.jpg"])
    annotate_images(target, {"width": {"cat/0.jpg": 4}})
    assert images_of(target).keys() == NAMES.keys()
    (away / "shard-000000.tar").unlink()
    with pytest.raises(ShardError, match=r"shard-000000\.tar is missing"):
        ShardDataset(target)


def test_very_many_classes_are_merged_in_their_number_of_steps(tmp_path):
    classes = [f"class {i}" for i in range(30_000)]
    for name in ("a", "b"):
        source = draw(tmp_path / f"src {name}", {f"class 7/{name}.jpg": 1})
        pack(source, tmp_path / name, append=False, classes=classes if name == "a" else [*classes, "last"])
    began = time.process_time()
    merged = merge_sets([tmp_path / "a", tmp_path / "b"], tmp_path / "new")
    assert time.process_time() - began < 5  # a set of all classes for each class takes 20 s
    assert (len(merged.classes), merged.samples) == (30_001, 2)


def test_a_set_that_another_merge_has_made_meanwhile_is_not_touched(target, tmp_path, monkeypatch):
    new = tmp_path / "new"
    merge_sets([target], new)
    before = files_of(new)
    monkeypatch.setattr(merge, "_check_target", lambda *arguments: None)
    real = Path.exists
    looks = iter([False])  # as it was when this merge looked first
    monkeypatch.setattr(Path, "exists", lambda path: next(looks, True) if path == new / "manifest.json" else real(path))
    with pytest.raises(ConfigurationError, match="was made by another process just now"):
        merge_sets([target], new)
    monkeypatch.undo()
    assert {name: data for name, data in files_of(new).items() if ".packing" not in name} == before


def test_columns_of_two_kinds_are_not_merged(target, tmp_path):
    pack(draw(tmp_path / "src2", {"ant/0.jpg": 1}), tmp_path / "other")
    annotate_images(tmp_path / "other", {"width": {"ant/0.jpg": "wide"}})
    annotate_images(target, {"width": {"cat/0.jpg": 4}})
    with pytest.raises(ConfigurationError, match="the column 'width' holds number and text"):
        merge_sets([target, tmp_path / "other"], tmp_path / "new")
    assert not list((tmp_path / "new").glob("*"))


def test_pruning_removes_what_no_generation_needs(target, tmp_path):
    for kind in ("bird", "cat"):
        delete_images(target, where=f"class_name == '{kind}'")
    pack(draw(tmp_path / "src3", {f"cat/x{i}.jpg": i for i in range(5)}), target)
    delete_images(target, where="class_name == 'cat'")
    left = images_of(target)
    assert generations(target) == [0, 1, 2, 3, 4]
    named = [{shard.name for shard in read_manifest(target, generation).shards} for generation in range(5)]
    pruned = prune_set(target, keep=2)
    assert (pruned.generations, set(pruned.shards)) == ([0, 1, 2], set.union(*named) - named[3] - named[4])
    with pytest.raises(ShardError, match=r"no generation 1: it has 3, 4"):
        ShardDataset(target, generation=1)
    pruned = prune_set(target)
    assert set(pruned.shards) == named[3] - named[4] != set()
    assert generations(target) == [4]
    assert images_of(target) == left
    assert verify(target, 1, lambda *numbers: None) == []
    assert sorted(path.name for path in (target / "index").iterdir()) == ["000004"]
    pack(draw(tmp_path / "src4", {"cat/y.jpg": 3}), target)
    assert ShardDataset(target)._files.path(len(read_manifest(target).shards) - 1).name not in pruned.shards
    with pytest.raises(ConfigurationError, match="--keep 0"):
        prune_set(target, keep=0)


def test_the_commands(target, tmp_path, capsys):
    def command(*words, code=0):
        assert main([str(word) for word in words]) == code, capsys.readouterr()
        return capsys.readouterr()

    assert "generation 1 has 20 images" in command("delete", target, "cat/3.jpg").out
    assert "nothing to do" in command("delete", target, "cat/3.jpg").out
    (tmp_path / "names").write_text("cat/4.jpg\r\ncat/5.jpg\n")
    assert "generation 2 has 18 images" in command("delete", target, "--names-from", tmp_path / "names").out
    table = command("ls", target, "--where", "class_name == 'cat'").out
    rows = sorted(csv.reader(io.StringIO(table)))
    assert rows == [[f"cat/{i}.jpg", "cat"] for i in (0, 1, 2, 6)] + [["path", "label"]]
    (tmp_path / "cats.csv").write_text(table.replace(",cat", ",lion"))
    assert "has no class 'lion'" in command("relabel", target, tmp_path / "cats.csv", code=2).err
    assert "generation 3 has 4 classes" in command("relabel", target, tmp_path / "cats.csv", "--new-classes").out
    assert "relabel 7 images" in command("relabel", target, "--where", "label == 0", "--to", "cat").out
    found = json.loads(command("stat", target, "--json").out)
    assert found["classes"] == {"bird": 0, "cat": 7, "horse": 7, "lion": 4}
    assert (found["images"], found["deleted"], found["generation"], len(found["generations"])) == (18, 3, 4, 5)
    text = command("stat", target).out
    assert "18 images of 4 classes" in text
    assert "3 deleted images in these shards still" in text
    assert "4  18 images  relabel 7 images" in text
    assert "generation 0 has 18 images of 4 classes" in command("merge", target, "--into", tmp_path / "new").out
    assert "4 generations and 0 shards (0.0 MiB) removed" in command("prune", target).out
    assert json.loads(command("stat", target, "--json").out)["deleted"] == 3
    assert "expected either LABELS.csv" in command("relabel", target, code=2).err
    assert "no image was named" in command("delete", target, code=2).err
    strange = "cat/a\u2028b\x85.jpg"
    pack(draw(tmp_path / "src5", {strange: 3}), target)
    (tmp_path / "names").write_text(strange + "\n", encoding="utf-8")
    assert "has 18 images" in command("delete", target, "--names-from", tmp_path / "names").out
    assert "no such image is of another class" in command("relabel", target, "--where", "label > 99", "--to", "cat").out
    assert "is not there. This is no folder" in command("stat", tmp_path / "src", code=1).err


@pytest.mark.parametrize("words", [["delete", "cat/1.jpg"], ["ls"], ["stat"], ["prune"], ["compact"]])
def test_a_url_is_not_taken_for_a_folder(words, capsys):
    with pytest.raises(SystemExit):
        main([words[0], "s3://bucket/set", *words[1:]])
    assert "s3://bucket/set is a URL, expected a folder" in capsys.readouterr().err
    assert main(["pack", "src", "s3://bucket/set"]) == 2
    assert "Pack into a folder, and copy it there" in capsys.readouterr().err
