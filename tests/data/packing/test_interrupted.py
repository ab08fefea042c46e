"""A packing that something ends goes on to the bytes that it would have written."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from lightning_ring.data import ShardDataset
from lightning_ring.data.packing.image import PackSettings
from lightning_ring.data.packing.writer import PackJob, read_records
from lightning_ring.data.shards import read_manifest
from lightning_ring.errors import ConfigurationError, ShardError
from tests.data.packing.packed import SETTINGS, Stop, contents, pack, pack_until
from tests.data.photos import image_folder
from tests.processes import clean_env, wait_for

COMMAND = "import sys; from lightning_ring.cli.pack import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize("at", [1, 20, 40])
def test_an_interrupted_packing_goes_on_to_the_same_bytes(source, packed, tmp_path, at):
    pack_until(at, source, tmp_path / "dst")
    with pytest.raises(
        ShardError, match=r"has not finished: run the same `lightning-ring pack` again"
    ):
        ShardDataset(tmp_path / "dst")
    whole = {shard.name: shard.bytes for shard in read_manifest(packed).shards}
    for path in (tmp_path / "dst").glob("*.tar"):
        assert path.stat().st_size == whole[path.name]
    done = []
    pack(source, tmp_path / "dst", progress=lambda number, *_: done.append(number))
    assert at < 20 or done[0] > 1  # it did not begin again
    assert contents(tmp_path / "dst") == contents(packed)


@pytest.mark.ranks
def test_killed_in_the_middle_it_goes_on_to_the_same_bytes(tmp_path):
    source = image_folder(tmp_path / "src", classes=2, images=300)
    arguments = [str(source), str(tmp_path / "dst"), "--size", "10", "--shard-mb", "0.05"]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments], env=clean_env(), stderr=subprocess.DEVNULL
    )
    wait_for(lambda: len(list((tmp_path / "dst").glob("*.tar"))) > 1 or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL, "it ended before it could be killed"
    settings = PackSettings(size=10, shard_mb=0.05)
    starts = []
    pack(source, tmp_path / "dst", settings, progress=lambda done, *_: starts.append(done))
    assert 1 < starts[0] < 600
    pack(source, tmp_path / "whole", settings)
    assert contents(tmp_path / "dst") == contents(tmp_path / "whole")


def test_two_packings_into_one_folder_are_an_error(source, tmp_path):
    def second(*numbers):
        with pytest.raises(ConfigurationError, match="another process is packing into"):
            pack(source, tmp_path / "dst")
        raise Stop

    with pytest.raises(Stop):
        pack(source, tmp_path / "dst", progress=second)


def test_a_source_that_vanishes_stops_the_packing(tmp_path):
    source = image_folder(tmp_path / "src", classes=1, images=40)

    def unmount(done, total, left_out):
        if done == 8:
            source.rename(tmp_path / "moved")

    with pytest.raises(
        ShardError, match=r"src cannot be read: .*\. Bring it back and run the same command again"
    ):
        pack(source, tmp_path / "dst", workers=1, progress=unmount)
    (tmp_path / "moved").rename(source)
    assert pack(source, tmp_path / "dst").samples == 40


def test_a_shard_that_is_written_anew_takes_those_after_it_along(source, tmp_path):
    state = tmp_path / "dst" / ".packing"

    pack_until(30, source, tmp_path / "dst")
    assert len(list(state.glob("shard-*.npz"))) > 2
    (tmp_path / "dst" / "shard-000001.tar").unlink()
    job = PackJob(source, tmp_path / "dst", SETTINGS)
    assert len(read_records(job)) == 1
    assert [path.name for path in state.glob("shard-*.npz")] == ["shard-000000.tar.npz"]


@pytest.mark.parametrize(
    "file", ["shard.part", "settings.json.part", "labels.npy.part", "manifest.json.part"]
)
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
