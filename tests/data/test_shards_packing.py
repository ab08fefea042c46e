"""A whole packing: what lies on the disk, and what an interruption leaves."""

from __future__ import annotations

import csv
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import ImageFolder

from lightning_ring.cli.pack import main
from lightning_ring.data import ShardDataset
from lightning_ring.data.packing import run, shard_loop
from lightning_ring.data.packing.settings import PackSettings
from lightning_ring.data.packing.shard_writer import read_records
from lightning_ring.data.shards.manifest import read_manifest
from lightning_ring.data.shards.verify import verify
from lightning_ring.errors import ConfigurationError, ShardError
from tests.data.photos import encode, image_folder, photo
from tests.processes import clean_env

SETTINGS = PackSettings(size=40, shard_mb=16 / 1024)  # 16 KiB: a few images a shard
COMMAND = "import sys; from lightning_ring.cli.pack import main; sys.exit(main(sys.argv[1:]))"


def pack(source, target, settings=SETTINGS, workers=2, progress=lambda done, total, left_out: None):
    return run.pack(Path(source), Path(target), settings, workers, progress)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    root = image_folder(tmp_path_factory.mktemp("images") / "src", classes=3, images=12)
    (root / "class 1" / "broken.jpg").write_bytes(encode(photo())[:700])
    (root / "class 1" / "text.jpg").write_text("some words")
    (root / "class 2" / "cmyk.jpg").write_bytes(encode(photo(77).convert("CMYK")))
    (root / "empty").mkdir()
    with open(os.fsencode(str(root / "class 2")) + b"/line\nfeed \xff.jpg", "wb") as file:
        file.write(encode(photo(78, 30, 24)))
    return root


@pytest.fixture(scope="module")
def packed(source, tmp_path_factory):
    target = tmp_path_factory.mktemp("packed") / "dst"
    pack(source, target)
    return target


def test_images_and_labels_are_those_of_image_folder(source, tmp_path):
    pack(source, tmp_path / "dst", PackSettings(size=0, group_by_class=True))
    dataset = ShardDataset(tmp_path / "dst", decode=False)
    expected = ImageFolder(str(source), allow_empty=True)
    usable = [(path, label) for path, label in expected.samples if Path(path).name not in ("broken.jpg", "text.jpg")]
    assert dataset.classes == expected.classes
    assert dataset.labels.tolist() == [label for _, label in usable]
    assert [dataset.name(i) for i in range(len(dataset))] == [os.path.relpath(path, source) for path, _ in usable]
    for i, (path, label) in enumerate(usable):
        if not path.endswith("cmyk.jpg"):
            assert dataset[i] == (Path(path).read_bytes(), label)


def test_everything_is_counted_and_named(source, packed):
    counts = read_manifest(packed).counts
    left_in = counts["copied"] + counts["shrunk"] + counts["turned"] + counts["converted"]
    assert left_in == len(ShardDataset(packed)) == 3 * 12 + 2
    assert (counts["left out"], counts["converted"], counts["empty classes"]) == (2, 1, 1)
    with open(packed / "report.csv", newline="", errors="surrogateescape") as file:
        rows = {name: (what, detail) for what, name, detail in csv.reader(file)}
    assert rows["class 1/broken.jpg"][0] == rows["class 1/text.jpg"][0] == "left out"
    assert rows["class 2/cmyk.jpg"] == ("converted", "CMYK to RGB")
    assert rows["empty"] == ("empty class", "has no image; label 3 does not occur")
    assert len(rows) == 5  # and the header


def test_shards_are_no_larger_than_asked_for(packed):
    manifest = read_manifest(packed)
    assert len(manifest.shards) > 3
    assert all((packed / shard.name).stat().st_size == shard.bytes <= 16 * 1024 for shard in manifest.shards)
    assert not (packed / ".packing").exists()


def test_an_image_larger_than_a_shard_has_one_of_its_own(source, tmp_path):
    pack(source, tmp_path / "dst", PackSettings(size=40, shard_mb=1e-4))
    assert {shard.samples for shard in read_manifest(tmp_path / "dst").shards} == {1}
    assert len(ShardDataset(tmp_path / "dst")) == 38


@pytest.mark.parametrize("workers", [1, 7])
def test_the_number_of_workers_changes_no_byte(source, packed, tmp_path, workers):
    pack(source, tmp_path / "dst", workers=workers)
    assert contents(tmp_path / "dst") == contents(packed)


class Stop(Exception):
    pass


@pytest.mark.parametrize("at", [1, 5, 20, 39, 40])
def test_an_interrupted_packing_goes_on_to_the_same_bytes(source, packed, tmp_path, at):
    def stop(done, total, left_out):
        assert total == 40
        if done == at:
            raise Stop

    with pytest.raises(Stop):
        pack(source, tmp_path / "dst", progress=stop)
    with pytest.raises(ShardError, match=r"has not finished: run the same `lightning-ring pack` again"):
        ShardDataset(tmp_path / "dst")
    whole = {shard.name: shard.bytes for shard in read_manifest(packed).shards}
    for path in (tmp_path / "dst").glob("*.tar"):
        assert path.stat().st_size == whole[path.name]
    done = []
    pack(source, tmp_path / "dst", progress=lambda n, total, left_out: done.append(n))
    assert at < 20 or done[0] > 1  # it did not begin again
    assert contents(tmp_path / "dst") == contents(packed)


@pytest.mark.parametrize("step", ["write_record", "write_manifest"])
def test_ended_between_two_files_it_goes_on_to_the_same_bytes(source, packed, tmp_path, step, monkeypatch):
    def stop(*arguments):
        raise Stop

    with monkeypatch.context() as patched:
        patched.setattr(shard_loop if step == "write_record" else run, step, stop)
        with pytest.raises(Stop):
            pack(source, tmp_path / "dst")
    pack(source, tmp_path / "dst")
    assert contents(tmp_path / "dst") == contents(packed)


@pytest.mark.ranks
def test_killed_in_the_middle_it_goes_on_to_the_same_bytes(tmp_path):
    source = image_folder(tmp_path / "src", classes=2, images=300)
    arguments = [str(source), str(tmp_path / "dst"), "--size", "10", "--shard-mb", "0.05"]
    process = subprocess.Popen([sys.executable, "-c", COMMAND, *arguments], env=clean_env(), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "dst").glob("*.tar"))) < 2 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL, "it ended before it could be killed"
    settings = PackSettings(size=10, shard_mb=0.05)
    starts = []
    pack(source, tmp_path / "dst", settings, progress=lambda done, total, left_out: starts.append(done))
    assert 1 < starts[0] < 600
    pack(source, tmp_path / "whole", settings)
    assert contents(tmp_path / "dst") == contents(tmp_path / "whole")


def test_packing_again_does_nothing(source, packed):
    before = {path: path.stat().st_mtime_ns for path in packed.rglob("*")}
    assert pack(source, packed).fingerprint == ShardDataset(packed).fingerprint
    assert {path: path.stat().st_mtime_ns for path in packed.rglob("*")} == before


def test_another_command_for_the_same_folder_is_an_error(source, packed, tmp_path):
    with pytest.raises(ConfigurationError, match=r"packed already with another command: size 40, now 50\."):
        pack(source, packed, PackSettings(size=50, shard_mb=SETTINGS.shard_mb))
    with pytest.raises(Stop):
        pack(source, tmp_path / "dst", progress=lambda *numbers: (_ for _ in ()).throw(Stop))
    with pytest.raises(ConfigurationError, match="half packed with another command: quality 90, now 80"):
        pack(source, tmp_path / "dst", PackSettings(size=40, shard_mb=SETTINGS.shard_mb, quality=80))


def csv_of(folder, labels):
    """``labels``: by photo. Each has another picture."""
    for i in range(len(labels)):
        if not (folder / f"{i}.jpg").exists():
            (folder / f"{i}.jpg").write_bytes(encode(photo(i, 60, 40)))
    (folder / "train.csv").write_text("path,label\n" + "".join(f"{i}.jpg,{label}\n" for i, label in enumerate(labels)))
    return folder / "train.csv"


def stop_at_the_end(done, total, left_out):
    if done == total:
        raise Stop


@pytest.mark.parametrize("half", [True, False])
def test_a_source_that_has_changed_is_an_error_that_says_what_has(tmp_path, half):
    file = csv_of(tmp_path, "abab" * 5)
    if half:
        with pytest.raises(Stop):
            pack(file, tmp_path / "dst", progress=stop_at_the_end)
        assert list((tmp_path / "dst").glob("*.tar"))
    else:
        pack(file, tmp_path / "dst")
    before = contents(tmp_path / "dst")
    state = "half packed" if half else "packed already"

    def refused(message):
        with pytest.raises(ConfigurationError, match=f"(?s)is {state}, and .* has changed since: {message}"):
            pack(file, tmp_path / "dst")
        assert contents(tmp_path / "dst") == before

    csv_of(tmp_path, "baba" * 5)
    refused(r"20 images in another class \(0.jpg: 'a', now 'b', 1.jpg: 'b', now 'a', and 18 more\)\. Nothing")
    csv_of(tmp_path, "abab" * 4 + "abac")
    refused(r"1 image in another class \(19.jpg: 'b', now 'c'\); 2 classes, now 3: new c\.")
    csv_of(tmp_path, "abab" * 5 + "a")
    refused(r"1 image added \(20.jpg\)\.")
    csv_of(tmp_path, "abab" * 4)
    refused(r"4 images removed \(1[6-9].jpg, 1[6-9].jpg, and 2 more\)\.")
    csv_of(tmp_path, "abab" * 5)
    (tmp_path / "3.jpg").write_bytes(encode(photo(99, 60, 40)))
    refused(r"1 image with another length or time \(3.jpg\)\.")


def test_a_source_that_changed_before_its_first_shard_is_packed_as_it_is_now(tmp_path):
    file = csv_of(tmp_path, "abab")
    with pytest.raises(Stop):
        pack(file, tmp_path / "dst", PackSettings(), progress=stop_at_the_end)
    csv_of(tmp_path, "cccb")
    pack(file, tmp_path / "dst", PackSettings())
    dataset = ShardDataset(tmp_path / "dst")
    assert {dataset.name(i): dataset.classes[dataset.labels[i]] for i in range(4)} == {
        f"{i}.jpg": label for i, label in enumerate("cccb")
    }


def test_two_packings_into_one_folder_are_an_error(source, tmp_path):
    def second(*numbers):
        with pytest.raises(ConfigurationError, match="another process is packing into"):
            pack(source, tmp_path / "dst")
        raise Stop

    with pytest.raises(Stop):
        pack(source, tmp_path / "dst", progress=second)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("nowhere", "dst"), "nowhere is not there. Expected a folder with a folder for each class"),
        (("src", "src/shards"), "is inside"),
        (("src", "other"), "other is not empty: it holds 'thesis.tex' and no packing"),
        (("bare", "dst"), "bare lists no image"),
        (("broken", "dst"), "none of 1 images can be packed. The first of them:\nleft out,a/x.jpg,cannot be decoded"),
    ],
)
def test_what_cannot_be_packed_says_why_and_leaves_nothing(tmp_path, names, message):
    for folder in ("src/a", "other", "bare", "broken/a"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "src" / "a" / "x.jpg").write_bytes(encode(photo()))
    (tmp_path / "other" / "thesis.tex").touch()
    (tmp_path / "broken" / "a" / "x.jpg").write_bytes(b"no")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigurationError, match=message):
        pack(tmp_path / names[0], tmp_path / names[1])
    assert sorted(path for path in tmp_path.rglob("*") if path != tmp_path / "dst") == before


def test_a_source_that_vanishes_stops_the_packing(tmp_path):
    source = image_folder(tmp_path / "src", classes=1, images=40)

    def unmount(done, total, left_out):
        if done == 8:
            source.rename(tmp_path / "moved")

    with pytest.raises(ShardError, match=r"src is gone\. Bring it back and run the same command again"):
        pack(source, tmp_path / "dst", workers=1, progress=unmount)
    (tmp_path / "moved").rename(source)
    assert pack(source, tmp_path / "dst").samples == 40


def test_a_csv_names_the_files_that_are_not_there(tmp_path):
    (tmp_path / "a.gif").write_bytes(encode(photo(), "GIF"))
    (tmp_path / "train.csv").write_text("path,label\na.gif,x\nmissing.jpg,x\n.,y\npipe.jpg,x\n")
    os.mkfifo(tmp_path / "pipe.jpg")
    manifest = pack(tmp_path / "train.csv", tmp_path / "dst")
    assert (manifest.samples, manifest.counts["left out"], manifest.counts["empty classes"]) == (1, 3, 1)
    report = (tmp_path / "dst" / "report.csv").read_text()
    assert "left out,missing.jpg,cannot be read: No such file or directory\n" in report
    assert "left out,.,cannot be read: not a regular file\n" in report
    assert "left out,pipe.jpg,cannot be read: not a regular file\n" in report
    assert "converted,a.gif,GIF to JPEG; P to RGB\n" in report


def test_names_that_no_disk_can_read_are_left_out(tmp_path):
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "a.png")
    (tmp_path / "self.png").symlink_to("self.png")
    long = "z" * 300
    (tmp_path / "train.csv").write_text(f"path,label\na.png,x\nself.png,x\n{long},x\n")
    assert pack(tmp_path / "train.csv", tmp_path / "dst").counts["left out"] == 2
    report = (tmp_path / "dst" / "report.csv").read_text()
    assert "left out,self.png,cannot be read: Too many levels of symbolic links\n" in report
    assert f"left out,{long},cannot be read: File name too long\n" in report


def test_a_shard_that_is_written_anew_takes_those_after_it_along(source, tmp_path):
    state = tmp_path / "dst" / run.PACKING

    def stop(done, total, left_out):
        if done == 30:
            raise Stop

    with pytest.raises(Stop):
        pack(source, tmp_path / "dst", progress=stop)
    assert len(list(state.glob("*.npz"))) > 2
    (tmp_path / "dst" / "shard-000001.tar").unlink()
    assert len(read_records(state, tmp_path / "dst")) == 1
    assert [path.name for path in state.glob("*.npz")] == ["shard-000000.tar.npz"]


@pytest.fixture
def small_disk(tmp_path):
    """A real disk of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk]).returncode:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_disk_that_fills_keeps_what_is_whole_and_goes_on_when_there_is_room(source, packed, small_disk):
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(2**20 - 2**17))  # 128 KiB are left: the index and some of the shards do not fit
    target = small_disk / "dst"
    settings = PackSettings(size=40, shard_mb=SETTINGS.shard_mb)
    with pytest.raises(ShardError, match=r"No space left on device \(\d+ MiB are free\)\. Make room\. Finished shards"):
        pack(source, target, settings)
    whole = {shard.name: (packed / shard.name).read_bytes() for shard in read_manifest(packed).shards}
    found = {path.name: path.read_bytes() for path in target.glob("*.tar")}
    assert len(found) > 0
    assert found.items() <= whole.items()
    assert not list(target.rglob("*.part"))
    ballast.unlink()
    pack(source, target, settings)
    assert contents(target) == contents(packed)


@pytest.mark.parametrize("file", ["shard.part", "sources.json.part", "labels.npy.part", "manifest.json.part"])
def test_a_disk_that_fills_at_any_file_is_an_error_that_can_be_gone_on_from(
    source, packed, tmp_path, file, monkeypatch
):
    real = os.fsync

    def full(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(f"/{file}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(ShardError, match="No space left on device"):
            pack(source, tmp_path / "dst")
    assert not list((tmp_path / "dst").rglob("*.part"))
    pack(source, tmp_path / "dst")
    assert contents(tmp_path / "dst") == contents(packed)


def test_the_command_packs_verifies_and_explains(source, packed, tmp_path, capsys):
    target = str(tmp_path / "dst")
    assert main([str(source), target, "--size", "40", "--shard-mb", str(16 / 1024), "--workers", "3"]) == 0
    assert contents(tmp_path / "dst") == contents(packed)
    output = capsys.readouterr().out
    assert "38 images of 4 classes" in output
    assert "left out: 2, listed in" in output
    assert main(["--verify", target]) == 0
    assert "38 images in 8 shards, all as they were packed" in capsys.readouterr().out
    shard = tmp_path / "dst" / "shard-000001.tar"
    shard.write_bytes(shard.read_bytes()[:-512])
    assert main(["--verify", target]) == 1
    assert f"{shard} is cut short" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["src"], "expected SRC and DST, got 1 path"),
        (["--verify", "a", "b"], "--verify takes DST alone, got 2 paths"),
        (["--verify", "a", "--workers", "0"], "--workers 0: expected 1 or more"),
        (["src", "dst", "--size", "-1"], "--size -1: expected pixels"),
        (["src", "dst", "--shard-mb", "0"], "--shard-mb 0.0: expected MiB, above 0"),
        (["src", "dst", "--quality", "101"], "--quality 101: expected"),
    ],
)
def test_wrong_command_lines_say_what_is_expected(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        main(arguments)


def test_verify_needs_no_more_than_the_folder(packed, tmp_path):
    assert verify(packed, 2, lambda done, total: None) == []
    with pytest.raises(ShardError, match=r"There is no such folder"):
        verify(tmp_path / "nowhere", 1, lambda done, total: None)


def test_gray_and_small_pictures_keep_their_bytes(tmp_path):
    (tmp_path / "src" / "a").mkdir(parents=True)
    data = encode(Image.fromarray(np.zeros((8, 8), np.uint8)), "PNG")
    (tmp_path / "src" / "a" / "digit.png").write_bytes(data)
    pack(tmp_path / "src", tmp_path / "dst")
    image, label = ShardDataset(tmp_path / "dst")[0]
    assert ShardDataset(tmp_path / "dst").read(0) == data
    assert (tuple(image.shape), label) == ((3, 8, 8), 0)
    assert json.loads((tmp_path / "dst" / "manifest.json").read_text())["samples"] == 1
