"""Images appended to a set: the next generation has them, and the one before stays what it was."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from lightning_ring.cli.main import main
from lightning_ring.data import ShardDataset
from lightning_ring.data.packing import run
from lightning_ring.data.sets.change import delete_images, relabel_images
from lightning_ring.data.sets.prune import prune_set
from lightning_ring.data.shards.manifest import generations, read_manifest
from lightning_ring.data.shards.verify import verify
from lightning_ring.errors import ConfigurationError, ShardError
from tests.data.photos import encode, photo
from tests.data.sets.daily import SETTINGS, draw, files_of, images_of, pack

FIRST = {f"{kind}/{i}.jpg": 10 * i + len(kind) for kind in ("bird", "cat") for i in range(6)}
SECOND = {f"{kind}/{i}.jpg": 1000 + 10 * i + len(kind) for kind in ("ant", "bird") for i in range(6, 10)}


@pytest.fixture
def source(tmp_path):
    return draw(tmp_path / "src", FIRST)


@pytest.fixture
def target(source, tmp_path):
    pack(source, tmp_path / "dst")
    return tmp_path / "dst"


def test_an_append_adds_what_is_new_and_changes_no_file_that_was_there(source, target):
    old, before = ShardDataset(target, decode=False), images_of(target)
    files = files_of(target)
    manifest = pack(draw(source, SECOND), target)
    assert (manifest.generation, manifest.counts["added"], manifest.counts["there"]) == (1, 8, 12)
    expected = {name: (name.split("/")[0], (source / name).read_bytes()) for name in {**FIRST, **SECOND}}
    assert images_of(target) == expected
    assert images_of(target, generation=0) == before
    assert manifest.classes == ["bird", "cat", "ant"]  # numbers stay; new ones follow
    assert old.generation == 0
    assert [old.read(i) for i in range(len(old))] == [before[old.name(i)][1] for i in range(len(old))]
    now = files_of(target)
    assert {name: now[name] for name in files if name != "manifest.json"} | {"manifest.json": b""} == files | {
        "manifest.json": b""
    }
    assert verify(target, 1, lambda *numbers: None) == []
    dataset = ShardDataset(target)
    assert [dataset.key(i) for i in range(20)] == [f"{i:09d}" for i in range(20)]
    np.testing.assert_array_equal(dataset.labels[:12], old.labels)
    assert not (target / ".packing").exists()


def test_nothing_new_makes_no_generation(source, target):
    before = files_of(target)
    manifest = pack(source, target)
    assert (manifest.generation, manifest.counts["added"], manifest.counts["there"]) == (0, 0, 12)
    (source / "cat" / "broken.jpg").write_bytes(b"no image")
    assert pack(source, target).counts["left out"] == 1
    now = files_of(target)
    assert b"cat/broken.jpg" in now.pop("index/left-out.csv")
    assert now == before


def test_appended_images_are_those_of_a_packing_in_one_go(source, target, tmp_path):
    pack(draw(source, SECOND), target)
    pack(source, tmp_path / "whole")
    assert images_of(target) == images_of(tmp_path / "whole")


def test_deleted_images_stay_deleted_and_relabelled_ones_stay_relabelled(source, target):
    delete_images(target, names=["cat/1.jpg"])
    relabel_images(target, {"cat/2.jpg": "bird"})
    draw(source, SECOND)
    with pytest.raises(ConfigurationError, match=r"1 image in another class \(cat/2.jpg: 'bird', now 'cat'\).*--keep"):
        pack(source, target)
    assert not (target / ".packing").exists()
    pack(source, target, keep_known=True)
    found = images_of(target)
    assert found.keys() == {*FIRST, *SECOND} - {"cat/1.jpg"}
    assert found["cat/2.jpg"][0] == "bird"
    pack(source, target, keep_known=True, restore=True)
    assert images_of(target).keys() == {*FIRST, *SECOND}
    delete_images(target, where="class_name == 'ant'")
    assert pack(source, target, keep_known=True).counts["added"] == 0
    assert [ShardDataset(target, generation=g).generation for g in generations(target)] == [0, 1, 2, 3, 4, 5]


def test_a_prefix_keeps_days_apart(target, tmp_path):
    day = draw(tmp_path / "day", {"cat/1.jpg": 77})
    with pytest.raises(ConfigurationError, match=r"1 image with another length or time \(cat/1.jpg\)"):
        pack(day, target)
    pack(day, target, prefix="day/")
    found = images_of(target)
    assert found["day/cat/1.jpg"] == ("cat", (day / "cat/1.jpg").read_bytes())
    assert len(found) == 13
    assert pack(day, target, prefix="day/").counts["added"] == 0


def test_classes_of_one_name_to_people_are_an_error(source, target):
    draw(source, {"Cat/x.jpg": 1})
    with pytest.raises(ConfigurationError, match="two classes of one name"):
        pack(source, target)
    assert read_manifest(target).generation == 0


class Stop(Exception):
    pass


def stop_at(number):
    def progress(done, total, left_out):
        if done == number:
            raise Stop

    return progress


def test_a_half_finished_append_refuses_other_changes_goes_on_or_is_given_up(source, target, tmp_path):
    before = images_of(target)
    draw(source, SECOND)
    with pytest.raises(Stop):
        pack(source, target, progress=stop_at(8))
    assert images_of(target) == before
    for change in (lambda: delete_images(target, names=["cat/1.jpg"]), lambda: prune_set(target)):
        with pytest.raises(ConfigurationError, match=r"half finished `pack --append`.*prune --unfinished"):
            change()
    with pytest.raises(ConfigurationError, match="half packed with another command: prefix None, now x"):
        pack(source, target, prefix="x")
    draw(source, {"ant/new.jpg": 5})
    with pytest.raises(ConfigurationError, match=r"1 image added \(ant/new.jpg\).*prune --unfinished"):
        pack(source, target)
    (source / "ant/new.jpg").unlink()
    done = []
    pack(source, target, progress=lambda n, total, left_out: done.append(n))
    assert done[0] > 1  # it went on
    assert images_of(target).keys() == {*FIRST, *SECOND}
    draw(source, {f"ant/more {i}.jpg": i for i in range(8)})
    with pytest.raises(Stop):
        pack(source, target, progress=stop_at(8))
    assert len(list(target.glob("*.tar"))) > len(read_manifest(target).shards)
    prune_set(target, keep=2, unfinished=True)
    assert {path.name for path in target.glob("*.tar")} == {shard.name for shard in read_manifest(target).shards}
    assert images_of(target).keys() == {*FIRST, *SECOND}
    assert delete_images(target, names=["cat/1.jpg"]).generation == 2


def test_a_data_set_travels_with_its_generation(source, target):
    old = ShardDataset(target, decode=False)
    data = pickle.dumps(old)
    pack(draw(source, SECOND), target)
    copy = pickle.loads(data)
    assert (copy.generation, len(copy), copy[3]) == (0, 12, old[3])
    assert (copy.at(None).generation, len(copy.at(None)), len(copy)) == (1, 20, 12)
    assert copy.at(None).fingerprint == ShardDataset(target).fingerprint != copy.fingerprint
    with pytest.raises(ShardError, match=r"has no generation 2: it has 0, 1\."):
        old.at(2)


def test_a_generation_that_was_never_finished_is_not_read_and_made_anew(source, target):
    draw(source, SECOND)
    pack(source, target)
    whole = files_of(target)
    manifest = (target / "index/000000/manifest.json").read_bytes()
    (target / "manifest.json").write_bytes(manifest)  # as if killed before the last rename
    assert generations(target) == [0]
    assert len(ShardDataset(target)) == 12
    pack(source, target)
    assert files_of(target) == whole


def test_what_a_finished_append_could_not_remove_disturbs_nothing(source, target, monkeypatch):
    draw(source, SECOND)
    with monkeypatch.context() as patched:  # as if killed between the manifest and the end
        patched.setattr(run, "clear", lambda path, **options: None)
        pack(source, target)
    assert (target / ".packing" / "settings.json").exists()
    more = draw(source.parent / "more", {"cat/7.jpg": 7})
    assert pack(more, target).counts["added"] == 1
    assert images_of(target).keys() == {*FIRST, *SECOND, "cat/7.jpg"}
    assert delete_images(target, names=["cat/7.jpg"]).generation == 3


def test_a_damaged_index_is_not_copied_into_the_next_generation(source, target):
    path = target / "index/000000/places.npy"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ShardError, match=r"places\.npy is not as it was packed"):
        delete_images(target, names=["cat/1.jpg"])
    with pytest.raises(ShardError, match=r"places\.npy is not as it was packed"):
        pack(draw(source, SECOND), target)
    assert read_manifest(target).generation == 0


def test_the_command_takes_the_sets_settings_and_says_what_it_added(source, target, capsys):
    draw(source, SECOND)
    (source / "ant" / "large.jpg").write_bytes(encode(photo(3, 200, 100)))
    assert main(["pack", "--append", str(source), str(target)]) == 0
    output = capsys.readouterr().out
    assert "generation 1: 9 images added, 12 were there already, or deleted" in output
    assert read_manifest(target).settings["size"] == SETTINGS.size
    dataset = ShardDataset(target, where="name == 'ant/large.jpg'")
    assert tuple(dataset[0][0].shape) == (3, 40, 80)
    assert main(["pack", str(source), str(target)]) == 2
    assert "is a set of generation 1 (append 9 images of" in capsys.readouterr().err
    assert main(["pack", str(source), str(target), "--restore"]) == 2
    assert main(["pack", "--append", "--verify", str(source)]) == 2
