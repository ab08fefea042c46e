"""Several processes pack a part of one source each."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from lightning_ring.cli.main import main
from lightning_ring.cli.pack import _part
from lightning_ring.data import ShardDataset
from lightning_ring.data.packing import sources as listing
from lightning_ring.data.packing.job import PackJob
from lightning_ring.data.packing.run import run_job
from lightning_ring.data.sets.change import delete_images
from lightning_ring.data.sets.prune import prune_set
from lightning_ring.data.shards.manifest import read_manifest
from lightning_ring.data.shards.verify import verify
from lightning_ring.errors import ConfigurationError
from tests.data.sets.daily import SETTINGS, draw, files_of, images_of, pack
from tests.processes import mpirun_command, run

NAMES = {f"{kind}/{i}.jpg": 10 * i + len(kind) for kind in ("bird", "cat") for i in range(10)}


@pytest.fixture
def source(tmp_path):
    root = draw(tmp_path / "src", NAMES)
    (root / "cat" / "broken.jpg").write_bytes(b"no")
    return root


def part(source, target, number, parts=3, progress=lambda *numbers: None, **options):
    job = PackJob(source, target, SETTINGS, part=number, parts=parts, **options)
    return run_job(job, 1, progress)


def test_parts_in_any_order_make_the_same_set(source, tmp_path):
    pack(source, tmp_path / "whole")
    first = None
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1)):  # each of them comes last
        target = tmp_path / "".join(map(str, order))
        *early, last = [part(source, target, number) for number in order]
        assert early == [None, None]
        assert last is not None
        assert last.counts == replace(read_manifest(tmp_path / "whole")).counts
        assert images_of(target) == images_of(tmp_path / "whole")
        assert verify(target, 1, lambda *numbers: None) == []
        keys = [ShardDataset(target).key(i) for i in range(20)]
        assert len(set(keys)) == 20
        first = first or files_of(target)
        assert files_of(target) == first
        assert part(source, target, 1).fingerprint == last.fingerprint  # given again


def test_parts_are_appended_interrupted_and_refused(source, tmp_path):
    target = tmp_path / "dst"
    pack(source, target)
    draw(source, {f"ant/{i}.jpg": 700 + i for i in range(24)})
    assert part(source, target, 0, append=True) is None

    class Stop(Exception):
        pass

    def stop(done, total, left_out):
        if done == 7:
            raise Stop

    with pytest.raises(Stop):
        part(source, target, 1, append=True, progress=stop)
    for refused, message in (
        (lambda: delete_images(target, names=["cat/1.jpg"]), "half finished `pack --append`"),
        (lambda: pack(source, target), "half packed in other parts .*this is a packing in one part"),
        (lambda: part(source, target, 0, parts=2, append=True), "in other parts .*this is part 1 of 2"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            refused()
    assert len(images_of(target)) == 20
    assert part(source, target, 2, append=True) is None
    done = part(source, target, 1, append=True)
    assert (done.generation, done.counts["added"]) == (1, 24)
    assert images_of(target).keys() == {*NAMES, *(f"ant/{i}.jpg" for i in range(24))}
    assert delete_images(target, names=["cat/1.jpg"]).generation == 2
    draw(source, {f"bird/x{i}.jpg": 800 + i for i in range(9)})
    assert part(source, target, 0, append=True) is None
    prune_set(target, unfinished=True)
    assert read_manifest(target).generation == 2
    assert {path.name for path in target.glob("*.tar")} == {shard.name for shard in read_manifest(target).shards}


def test_a_source_that_changes_between_parts_is_an_error(source, tmp_path):
    assert part(source, tmp_path / "dst", 0, parts=2) is None
    draw(source, {"cat/new.jpg": 3})
    with pytest.raises(ConfigurationError, match="was another one for part 1 of 2 than for part 2"):
        part(source, tmp_path / "dst", 1, parts=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"settings": replace(SETTINGS, quality=80)}, "quality 90, now 80"),
        ({"settings": replace(SETTINGS, group_by_class=True)}, "group_by_class False, now True"),
        ({"prefix": "day/"}, "prefix None, now day/"),
    ],
)
def test_a_part_with_other_settings_is_refused(source, tmp_path, options, message):
    assert part(source, tmp_path / "dst", 0, parts=2) is None
    job = replace(PackJob(source, tmp_path / "dst", SETTINGS, part=1, parts=2), **options)
    with pytest.raises(ConfigurationError, match=f"half packed with another command: {message}"):
        run_job(job, 1, lambda *numbers: None)
    assert part(source, tmp_path / "dst", 1, parts=2) is not None


def test_parts_that_restore_and_parts_that_do_not_are_refused(source, tmp_path):
    pack(source, tmp_path / "dst")
    delete_images(tmp_path / "dst", where="class_name == 'cat'")
    draw(source, {f"ant/{i}.jpg": 700 + i for i in range(8)})
    assert part(source, tmp_path / "dst", 0, parts=2, append=True) is None
    with pytest.raises(ConfigurationError, match="restore None, now True"):
        part(source, tmp_path / "dst", 1, parts=2, append=True, restore=True)


def test_parts_that_mixed_the_list_in_two_ways_are_refused(source, tmp_path, monkeypatch):
    assert part(source, tmp_path / "dst", 0, parts=2) is None
    monkeypatch.setattr(listing, "_SEED", 1)  # as another version of numpy may
    message = rf"or hosts have other versions of numpy. Give it up \(remove {tmp_path}"
    with pytest.raises(ConfigurationError, match=message):
        part(source, tmp_path / "dst", 1, parts=2)


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "ranks"])
def test_a_wrong_part_says_what_is_expected(text, monkeypatch):
    monkeypatch.setattr("os.environ", {})
    with pytest.raises(ConfigurationError, match=f"--part {text}: (expected I/N|no launcher)"):
        _part(text)
    assert _part("2/3") == (2, 3)


@pytest.mark.ranks
def test_ranks_of_mpirun_pack_one_set(source, tmp_path):
    words = ["pack", str(source), str(tmp_path / "dst"), "--size", "40", "--shard-mb", "0.015625", "--part", "ranks"]
    done = run(mpirun_command(3, sys.executable, "-m", "lightning_ring.cli.main", *words))
    assert done.returncode == 0, done.stdout
    left_to_others = done.stdout.count("the last part to end makes the set")
    made = done.stdout.count("20 images of 2 classes")
    assert made >= 1
    assert left_to_others + made == 3  # parts that end at the same time all find the whole set
    assert images_of(tmp_path / "dst").keys() == set(NAMES)
    assert main(["pack", "--verify", str(tmp_path / "dst")]) == 0
