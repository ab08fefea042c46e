"""Images appended to a set: the next generation has them, and the one before stays what it was."""

import pickle
import shutil

import numpy as np
import pytest

from lightning_ring.cli.main import main
from lightning_ring.data import CenterCrop, Mixture, ShardDataset, ShuffledSampler, image_loader
from lightning_ring.data.packing.run import only_one
from lightning_ring.data.shards import generations, read_manifest
from lightning_ring.errors import ConfigurationError, ShardError
from lightning_ring.host import file_lock
from lightning_ring.integrations.lightning.data import check_same_images
from tests.data.packing.packed import SETTINGS, contents, pack, pack_until, verify
from tests.data.photos import encode, photo
from tests.refusals import refused
from tests.thread_ranks import run_ranks

FIRST = {f"{kind}/{i}.jpg": 10 * i + len(kind) for kind in ("bird", "cat") for i in range(6)}
SECOND = {
    f"{kind}/{i}.jpg": 1000 + 10 * i + len(kind) for kind in ("ant", "bird") for i in range(6, 10)
}


def draw(folder, names):
    """A picture for each name, drawn from its seed."""
    for name, seed in names.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(photo(seed, 40, 30)))
    return folder


def append(source, target, **options):
    return pack(source, target, append=True, **options)


def images_of(root, **options):
    """Class and bytes of every image, by name."""
    dataset = ShardDataset(root, decode=False, **options)
    return {
        dataset.name(i): (dataset.classes[dataset.labels[i]], dataset.read(i))
        for i in range(len(dataset))
    }


@pytest.fixture
def source(tmp_path):
    return draw(tmp_path / "src", FIRST)


@pytest.fixture
def target(source, tmp_path):
    append(source, tmp_path / "dst")
    return tmp_path / "dst"


def test_an_append_adds_what_is_new_and_changes_no_file_that_was_there(source, target):
    old, before, files = ShardDataset(target, decode=False), images_of(target), contents(target)
    manifest = append(draw(source, SECOND), target)
    assert (manifest.generation, manifest.counts["added"], manifest.counts["there"]) == (1, 8, 12)
    expected = {
        name: (name.split("/")[0], (source / name).read_bytes()) for name in {**FIRST, **SECOND}
    }
    assert images_of(target) == expected
    assert images_of(target, generation=0) == before
    assert manifest.classes == ["bird", "cat", "ant"]  # numbers stay; new ones follow
    assert [old.read(i) for i in range(len(old))] == [
        before[old.name(i)][1] for i in range(len(old))
    ]
    now = contents(target)
    del files["manifest.json"]
    assert {name: now[name] for name in files} == files
    assert verify(target) == []
    dataset = ShardDataset(target)
    np.testing.assert_array_equal(dataset.labels[:12], old.labels)
    assert not (target / ".packing").exists()
    with pytest.raises(ShardError, match=r"has no generation 2: it has 0, 1\."):
        ShardDataset(target, generation=2)


def test_nothing_new_makes_no_generation(source, target):
    before = contents(target)
    manifest = append(source, target)
    assert (manifest.generation, manifest.counts["added"], manifest.counts["there"]) == (0, 0, 12)
    (source / "cat" / "broken.jpg").write_bytes(b"no image")
    assert append(source, target).counts["left out"] == 1
    now = contents(target)
    assert b"cat/broken.jpg" in now.pop("index/left-out.csv")
    assert now == before


def test_a_name_of_the_set_with_another_class_or_file_is_an_error(source, target):
    before = contents(target)
    (source / "cat" / "1.jpg").write_bytes(encode(photo(99, 50, 40)))
    with refused(r"1 images of these names with another .* cat/1.jpg\. Nothing"):
        append(source, target)
    draw(source, {"Cat/x.jpg": 1})
    with refused("two classes of one name"):
        append(source, target)
    listed = source.parent / "listed.csv"
    listed.write_text(f"path,label\n{source / 'cat/2.jpg'},bird\n")
    append(listed, target)  # the path is another name
    listed.write_text(f"path,label\n{source / 'cat/2.jpg'},cat\n")
    with refused(r"1 images of these names with another class, .*cat/2.jpg"):
        append(listed, target)
    now = contents(target)
    assert {name: now[name] for name in before if name != "manifest.json"}.items() <= before.items()
    assert not (target / ".packing").exists()


def test_a_half_finished_append_goes_on_or_is_given_up(source, target):
    before = images_of(target)
    draw(source, SECOND)
    pack_until(8, source, target, append=True)
    assert images_of(target) == before
    draw(source, {"ant/new.jpg": 5})
    with refused(r"has changed since.*remove .*dst/\.packing"):
        append(source, target)
    (source / "ant/new.jpg").unlink()
    done = []
    append(source, target, progress=lambda n, total, left_out: done.append(n))
    assert done[0] > 1  # it went on
    assert images_of(target).keys() == {*FIRST, *SECOND}
    draw(source, {f"ant/more {i}.jpg": i for i in range(8)})
    pack_until(8, source, target, append=True)
    other = draw(source.parent / "other", {"cat/7.jpg": 7})
    with refused(r"half packed with another command: source .*remove .*dst/\.packing"):
        append(other, target)
    for path in (target / ".packing").iterdir():
        path.unlink()
    append(other, target)
    assert images_of(target).keys() == {*FIRST, *SECOND, "cat/7.jpg"}


def test_a_generation_that_was_never_finished_is_not_read_and_made_anew(
    source, target, monkeypatch
):
    draw(source, SECOND)
    append(source, target)
    whole = contents(target)
    first = (target / "index/000000/manifest.json").read_bytes()
    (target / "manifest.json").write_bytes(first)  # as if killed before the last rename
    assert generations(target) == [0]
    assert len(ShardDataset(target)) == 12
    append(source, target)
    assert contents(target) == whole
    draw(source, {"cat/8.jpg": 8})
    with monkeypatch.context() as patched:  # as if killed between the manifest and the end
        patched.setattr(shutil, "rmtree", lambda path, **options: None)
        append(source, target)
    assert (target / ".packing" / "settings.json").exists()
    assert append(draw(source, {"cat/7.jpg": 7}), target).counts["added"] == 1
    assert images_of(target).keys() == {*FIRST, *SECOND, "cat/7.jpg", "cat/8.jpg"}


def test_old_generations_are_verified_too(source, target):
    append(draw(source, SECOND), target)
    stamps = target / "index/000000/stamps.npy"
    data = bytearray(stamps.read_bytes())
    data[-1] ^= 1
    stamps.write_bytes(data)
    (problem,) = verify(target)
    assert str(stamps) in problem


def test_the_command_takes_the_sets_settings_and_says_what_it_added(source, target, capsys):
    draw(source, SECOND)
    (source / "ant" / "large.jpg").write_bytes(encode(photo(3, 200, 100)))
    assert main(["pack", "--append", str(source), str(target)]) == 0
    assert "generation 1: 9 images added, 12 were there already" in capsys.readouterr().out
    assert read_manifest(target).settings["size"] == SETTINGS.size
    dataset = ShardDataset(target)
    (large,) = (i for i in range(len(dataset)) if dataset.name(i) == "ant/large.jpg")
    assert tuple(dataset[large][0].shape) == (3, 40, 80)
    assert main(["pack", str(source), str(target)]) == 2
    assert "images were appended to" in capsys.readouterr().err
    assert main(["pack", "--append", "--verify", str(source)]) == 2
    with pytest.raises(SystemExit):
        main(["pack", str(source), "s3://bucket/set"])
    assert "s3://bucket/set is a URL, expected a folder" in capsys.readouterr().err


# -- locks


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, caplog):
    with only_one(tmp_path / "a"):
        assert not caplog.messages
    monkeypatch.setattr(file_lock, "fcntl", None)
    with only_one(tmp_path / "b"):
        assert caplog.messages == [
            f"lightning_ring: {tmp_path / 'b'} has no locks. See to it that one process alone "
            "packs."
        ]


# -- trainings that go on


def loader(photos, **options):
    sampler = ShuffledSampler(len(photos))
    return image_loader(
        photos,
        sampler,
        4,
        crop=CenterCrop(8, resize=8),
        transform=None,
        with_indices=True,
        **options,
    )


def test_a_data_set_travels_with_its_generation(source, target):
    old = ShardDataset(target, decode=False)
    data = pickle.dumps(old)
    append(draw(source, SECOND), target)
    copy = pickle.loads(data)
    assert (copy.generation, len(copy), copy[3]) == (0, 12, old[3])
    assert (
        ShardDataset(target).fingerprint
        != copy.fingerprint
        == ShardDataset(target, generation=0).fingerprint
    )


@pytest.mark.parametrize("mixed", [False, True])
def test_a_training_goes_on_over_its_images_and_no_others(source, target, mixed):
    def opened(**options):
        photos = ShardDataset(target, **options)
        return Mixture([photos, photos]) if mixed else photos

    began = loader(opened())
    whole = [batch[2].tolist() for batch in loader(opened())]
    iterator = iter(began)
    head = [next(iterator)[2].tolist()]
    state = began.state_dict()
    iterator.close()
    append(draw(source, SECOND), target)
    with refused(r"saved over the images '.*ShardDataset\(\.\.\., generation=N"):
        loader(opened()).load_state_dict(state)
    resumed = loader(opened(generation=0))
    # as elastic jobs hand it on: the images stay
    resumed.load_state_dict({"sampler": state["sampler"], "batches": 1})
    resumed.load_state_dict(state)
    assert head + [batch[2].tolist() for batch in resumed] == whole


def test_ranks_that_opened_different_generations_are_told(source, target):
    old = ShardDataset(target)
    append(draw(source, SECOND), target)
    sets = [old, ShardDataset(target), ShardDataset(target)]

    def check(comm, photos):
        try:
            check_same_images(loader(photos[comm.rank]), comm)
        except ConfigurationError as error:
            return str(error)
        return "the same"

    told = run_ranks(3, lambda comm: check(comm, sets))
    assert len(set(told)) == 1
    assert "ranks read different images: rank 0 reads 'generation 0, " in told[0]
    assert "rank 1 reads 'generation 1, " in told[0]
    assert run_ranks(3, lambda comm: check(comm, sets[1:2] * 3)) == ["the same"] * 3
