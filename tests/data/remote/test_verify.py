"""``lightning-ring pack --verify`` of a set at a URL."""

from __future__ import annotations

import shutil

from lightning_ring.cli.main import main
from lightning_ring.data import ShardDataset
from lightning_ring.data.shards.manifest import read_manifest
from tests.data.remote.faulty_server import serve


def test_a_set_at_a_url_is_verified(packed, server, tmp_path, capsys):
    assert main(["pack", "--verify", server.url]) == 0
    assert f"{server.url}: 240 images in" in capsys.readouterr().out
    shutil.copytree(packed, folder := tmp_path / "set")
    dataset = ShardDataset(folder)
    place = dataset._index.place(17)
    name = read_manifest(folder).shards[place.shard].name
    with open(folder / name, "r+b") as file:
        file.seek(place.offset + 60)
        file.write(b"wrong")
    (folder / "report.csv").write_text("other")
    with serve(folder) as other:
        assert main(["pack", "--verify", other.url]) == 1
        report, image, shard = capsys.readouterr().out.splitlines()
        assert f"{other.url}/report.csv has SHA-256" in report
        assert f"{other.url}/{name}, offset {place.offset}, {place.size} bytes, image 17: its bytes" in image
        assert f"{other.url}/{name} has SHA-256" in shard
        (folder / name).unlink()
        assert main(["pack", "--verify", other.url]) == 1
        assert f"{name} cannot be read: it is not there" in capsys.readouterr().err
    assert main(["pack", "--verify", "nonsense://bucket/set"]) == 2


def test_a_report_that_is_missing_hides_no_other_damage(packed, tmp_path, capsys):
    shutil.copytree(packed, folder := tmp_path / "set")
    (folder / "report.csv").unlink()
    with open(folder / "shard-000001.tar", "r+b") as file:
        file.seek(3000)
        file.write(b"wrong")
    with serve(folder) as server:
        assert main(["pack", "--verify", server.url]) == 1
    said = capsys.readouterr()
    assert f"{server.url}/report.csv cannot be read: it is not there" in said.out
    assert f"{server.url}/shard-000001.tar has SHA-256" in said.out
    assert said.err.startswith(f"{server.url}: ")


def test_a_store_that_refuses_is_no_wrong_command_line(server, capsys):
    server.plant(statuses={"shard-000001.tar": 403})
    assert main(["pack", "--verify", server.url]) == 1
    assert "access is denied" in capsys.readouterr().err
