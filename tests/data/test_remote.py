"""Shards on an HTTP server that delays, fails and lies: the right images, or an error that names the object."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_ring.cli.main import main
from lightning_ring.data import RandomResizedCrop, Remote, ShardDataset, ShuffledSampler, image_loader, item_loader
from lightning_ring.data.packing import run
from lightning_ring.data.packing.settings import PackSettings
from lightning_ring.data.remote.cached_shard import BLOCK, CachedShard
from lightning_ring.data.remote.files import _neighbours
from lightning_ring.data.sets.change import delete_images
from lightning_ring.data.shards.manifest import read_manifest
from lightning_ring.errors import ConfigurationError, RingError, ShardError, StoreError
from tests.data.faulty_server import Server, serve
from tests.data.photos import image_folder

pytest.importorskip("aiohttp", reason="the extra `remote` is not installed")
SMALL = 700 * 1024 / 2**30  # GiB: less than the set, so that samples' own bytes are fetched


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shards")
    source = image_folder(root / "src", classes=3, images=80)
    run.pack(source, root / "dst", PackSettings(size=40, shard_mb=60 / 1024), 2, lambda *numbers: None)
    return root / "dst"


@pytest.fixture(scope="module")
def everything(packed: Path) -> list[bytes]:
    dataset = ShardDataset(packed)
    return dataset.read_many(range(len(dataset)))


@pytest.fixture(scope="module")
def running(packed: Path) -> Iterator[Server]:
    with serve(packed) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Server:
    running.plant()
    return running


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote(cache=tmp_path / "cache", deadline=4)


def opened(server: Server, remote: Remote, **changes: Any) -> ShardDataset:
    return ShardDataset(server.url, decode=False, remote=replace(remote, **changes))


def shuffled(size: int, seed: int = 0) -> list[int]:
    return random.Random(seed).sample(range(size), size)


def taken(folder: Path) -> int:
    """Bytes that the cache takes on the disk."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    for link in Path("/proc/self/fd").iterdir():  # removed, and still open
        with suppress(FileNotFoundError):
            if str(folder) in (name := os.readlink(link)) and name.endswith(" (deleted)"):
                total += link.stat().st_blocks * 512
    return total


def test_it_is_the_same_data_set_and_the_second_epoch_asks_for_nothing(packed, server, remote, everything):
    local, dataset = ShardDataset(packed), opened(server, remote)
    assert (dataset.fingerprint, dataset.classes, len(dataset)) == (local.fingerprint, local.classes, len(local))
    assert dataset.labels.tolist() == local.labels.tolist()
    order = shuffled(len(dataset))
    server.plant()
    assert dataset.read_many(order) == [everything[i] for i in order]
    whole = sum(path.stat().st_size for path in packed.glob("*.tar"))
    assert server.bytes_sent <= whole  # each byte once
    server.plant()
    assert [dataset.read(i) for i in order] == [everything[i] for i in order]
    assert dataset.name(5) == local.name(5)
    assert f"{server.url}/shard-00000" in dataset.where(5)
    again = opened(server, remote)  # another rank of the node, or another job
    assert again.read_many(order) == [everything[i] for i in order]
    assert server.counts == {"requests": 1}  # of the manifest, which says whether the set has changed


def test_ranks_that_ask_for_the_same_at_once_share_most_of_it(packed, server, remote, everything):
    ranks = [opened(server, remote, num_requests=1) for _ in range(2)]
    server.plant(delay=0.02)
    order = shuffled(len(everything))
    for rank in ranks:
        rank.will_need(order)
    for rank in ranks:
        assert rank.read_many(order) == [everything[i] for i in order]
    whole = sum(path.stat().st_size for path in packed.glob("*.tar"))
    assert server.bytes_sent <= 1.1 * whole  # not twice


def test_a_set_larger_than_the_cache_is_read_sample_by_sample(packed, server, remote, everything):
    dataset = opened(server, remote, cache_gb=SMALL)
    server.plant()
    for i in (7, 100, 3):
        assert dataset.read(i) == everything[i]
    needed = sum(len(everything[i]) for i in (7, 100, 3))
    assert server.bytes_sent <= needed + 3 * 2 * BLOCK
    assert taken(Path(str(remote.cache))) < 2**20


def test_no_fault_of_the_server_gives_a_wrong_sample(server, remote, everything):
    faults = {"hang": 0.01, "unavailable": 0.08, "truncate": 0.08, "short": 0.04, "reset": 0.08, "flip": 0.03}
    played = set()
    for seed in range(20):
        if played == set(faults):
            break
        cache = Path(str(remote.cache)) / str(seed)
        dataset = opened(server, remote, cache=cache, cache_gb=SMALL, deadline=30, num_requests=8)
        server.plant(seed=seed, **faults)
        order = shuffled(len(dataset), seed)[:100]
        with ThreadPoolExecutor(4) as pool:
            parts = [order[i::4] for i in range(4)]
            for part, got in zip(parts, pool.map(dataset.read_many, parts), strict=True):
                assert got == [everything[i] for i in part]
        played |= set(server.counts) - {"requests"}
    assert played == set(faults)


def test_a_store_that_answers_no_more_is_an_error_in_time_that_names_the_object(server, remote):
    dataset = opened(server, remote, cache_gb=SMALL, deadline=1.5, num_requests=2)
    server.plant(dead=True)
    began = time.monotonic()
    dataset.will_need(range(100))  # fifty deadlines, if each of them waited for its own
    with pytest.raises(StoreError, match=rf"{server.url}/shard-\d+\.tar, bytes \d+ to \d+, could not be read in 1.5 s"):
        dataset.read(99)
    assert time.monotonic() - began < 40
    server.plant(short=1.0)
    with pytest.raises(StoreError, match=r"could not be read in 1.5 s, .*: \d+ of \d+ bytes came"):
        dataset.read(98)
    server.plant()
    assert dataset.read(99)  # and it goes on when the store does


@pytest.mark.parametrize(("status", "error", "says"), [(404, ShardError, "not there"), (403, StoreError, "denied")])
def test_some_answers_are_final(server, remote, status, error, says):
    dataset = opened(server, remote, deadline=120)
    server.plant(statuses={"shard-000001": status})
    began = time.monotonic()
    with pytest.raises(error, match=rf"shard-000001.tar, bytes .* {says}"):
        dataset.read_many(range(len(dataset)))
    assert time.monotonic() - began < 60  # it was not tried again until the deadline


def test_opening_names_what_is_missing(packed, server, remote):
    server.plant(statuses={"shard-000000": 404, "shard-000002": 404})
    with pytest.raises(ShardError, match=r"shard-000000.tar cannot be read(.|\n)*shard-000002.tar(.|\n)*Upload"):
        opened(server, remote)
    server.plant(statuses={"manifest.json": 404})
    with pytest.raises(ShardError, match=rf"{server.url}/manifest.json cannot be read: it is not there"):
        opened(server, remote)
    server.plant(statuses={"labels.npy": 503})
    with pytest.raises(StoreError, match=r"labels.npy could not be read in 2 s, with \d+ tries: .*503"):
        opened(server, remote, deadline=2)
    server.plant()
    assert len(opened(server, remote)) > 0


@pytest.mark.parametrize("name", ["../../planted", "/tmp/planted", "index/000000/labels.npy"])
def test_a_manifest_cannot_write_outside_the_cache(packed, remote, tmp_path, name):
    manifest = read_manifest(packed)
    files = manifest.files | {name: "../planted" if name.startswith("index") else "0" * 64}
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "manifest.json").write_text(replace(manifest, files=files).to_json())
    with (
        serve(tmp_path / "set") as server,
        pytest.raises(ShardError, match=r"names '.*planted', expected paths inside"),
    ):
        opened(server, remote)


def test_a_server_without_ranges_is_named_as_such(server, remote):
    dataset = opened(server, remote, cache_gb=SMALL)
    server.plant(no_ranges=True)
    with pytest.raises(StoreError, match="does not answer requests for ranges"):
        dataset.read(3)


def test_a_shard_that_is_damaged_in_the_store_is_an_error_and_nothing_else_is(server, remote, everything):
    dataset = opened(server, remote, cache_gb=SMALL)
    server.plant(flip=1.0)
    with pytest.raises(ShardError, match=rf"image 11 .*{server.url}/shard-.*offset \d+, .*CRC-32 .* expected"):
        dataset.read(11)
    assert server.counts["flip"] == 3
    server.plant()
    assert dataset.read(11) == everything[11]


def test_damage_of_the_cache_is_mended(server, remote, everything):
    dataset = opened(server, remote)
    dataset.read_many(range(len(dataset)))
    for path in (Path(str(remote.cache)) / "shards").iterdir():
        with open(path, "r+b") as file:
            file.write(b"\0" * 20_000)  # a crash of the machine: the file system has lost bytes
    server.plant()
    assert dataset.read_many(range(len(dataset))) == everything
    assert server.counts["requests"] > 0
    expected = dataset.labels.tolist()
    (labels,) = Path(str(remote.cache)).rglob("labels.npy")
    labels.write_bytes(labels.read_bytes()[:-4] + b"\7\0\0\0")
    assert opened(server, remote).labels.tolist() == expected


@pytest.mark.ranks  # takes seconds
def test_the_cache_keeps_its_limit(server, remote, everything):
    limit = int(SMALL * 2**30)
    dataset = opened(server, remote, cache_gb=SMALL)
    server.plant()
    most = 0
    for epoch in range(2):
        for i in shuffled(len(dataset), epoch)[: 240 - 120 * epoch]:
            assert dataset.read(i) == everything[i]
            most = max(most, taken(Path(str(remote.cache))))
    assert limit / 2 < most <= limit
    assert server.bytes_sent > limit  # so that some was removed and fetched again


def _read_for_ever(server_url: str, remote: Remote, seed: int, everything: list[bytes], wrong: Any) -> None:
    dataset = ShardDataset(server_url, decode=False, remote=remote)
    draw = random.Random(seed)
    while True:
        order = draw.sample(range(len(dataset)), 16)
        if dataset.read_many(order) != [everything[i] for i in order]:
            wrong.set()


@pytest.mark.ranks
def test_processes_that_share_a_cache_and_are_killed_leave_no_wrong_bytes(server, remote, everything):
    limit = int(SMALL * 2**30)
    remote = Remote(cache=remote.cache, cache_gb=SMALL, deadline=60)
    context = multiprocessing.get_context("fork")
    wrong = context.Event()
    most = 0
    for turn in range(3):
        children = [
            context.Process(target=_read_for_ever, args=(server.url, remote, 10 * turn + n, everything, wrong))
            for n in range(3)
        ]
        for child in children:
            child.start()
        begin = time.monotonic()
        while (seconds := time.monotonic() - begin) < 0.6 or (most == 0 and seconds < 60):
            most = max(most, taken(Path(str(remote.cache))))
            time.sleep(0.01)
        assert all(child.is_alive() for child in children)
        for child in children:
            os.kill(child.pid or 0, signal.SIGKILL)
            child.join()
    assert not wrong.is_set()
    assert 0 < most <= limit
    dataset = opened(server, remote)
    order = shuffled(len(dataset))
    assert dataset.read_many(order) == [everything[i] for i in order]


@pytest.mark.ranks
def test_forked_workers_read_with_connections_of_their_own(server, remote, everything):
    dataset = opened(server, remote, cache_gb=SMALL, deadline=100)
    server.plant(delay=0.15)
    dataset.will_need(range(40))  # the parent has threads, connections, a lock and requests that are under way
    loader: Any = DataLoader(
        dataset, batch_size=16, num_workers=2, multiprocessing_context="fork", timeout=120, collate_fn=list
    )
    got = list(itertools.chain(*loader))
    assert [data for data, _ in got] == everything


def test_it_travels_as_a_url(server, remote, everything):
    dataset = opened(server, remote)
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.read(7) == everything[7]
    assert copy.remote == dataset.remote


@pytest.mark.parametrize("kind", ["images", "items"])
def test_a_loader_asks_for_what_comes_and_gives_the_same_batches(packed, server, remote, kind):
    def batches(dataset: ShardDataset, state: Any = None) -> Iterator[Any]:
        sampler = ShuffledSampler(len(dataset), rank=0, world_size=1, fingerprint="photos")
        if kind == "images":
            crop = RandomResizedCrop(16)
            loader = image_loader(dataset, sampler, 8, crop=crop, transform=None, with_indices=True, num_threads=1)
        else:
            loader = item_loader(dataset, sampler, 8, collate=list, num_threads=1)
        if state is not None:
            loader.load_state_dict(state)
        for batch in loader:
            yield batch, loader.state_dict()

    expected = list(batches(ShardDataset(packed, decode=False)))
    dataset = opened(server, remote, cache_gb=SMALL, lookahead=64)
    server.plant()
    going = batches(dataset)
    got = [next(going)]
    end = time.monotonic() + 60  # the samples of ten batches, of which two were needed, come without being read
    order = list(ShuffledSampler(len(dataset), rank=0, world_size=1))
    while (
        time.monotonic() < end
        and not all(
            dataset._files._has(unit)  # type: ignore[union-attr]
            for i in order[:64]
            for unit in dataset._files._units(dataset._index.place(i))  # type: ignore[union-attr]
        )
    ):
        time.sleep(0.01)
    assert time.monotonic() < end
    got += list(going)
    resumed = list(batches(dataset, expected[5][1]))
    for some, whole in ((got, expected), (resumed, expected[6:])):
        assert len(some) == len(whole) > 0
        for (batch, state), (other, other_state) in zip(some, whole, strict=True):
            assert state == other_state
            if kind == "images":
                assert all(torch.equal(a, b) for a, b in zip(batch, other, strict=True))
            else:
                assert batch == other


def test_an_outage_is_not_taken_for_broken_images(server, remote):
    dataset = opened(server, remote, cache_gb=SMALL, deadline=0.5)
    sampler = ShuffledSampler(len(dataset), rank=0, world_size=1)
    loader = image_loader(dataset, sampler, 8, crop=RandomResizedCrop(16), transform=None, on_error="skip")
    server.plant(dead=True)
    with pytest.raises(StoreError, match=r"could not be read in 0\.5 s"):
        next(iter(loader))


def test_a_cache_that_is_too_small_is_not_taken_for_broken_images(server, remote, monkeypatch):
    dataset = opened(server, remote)
    sampler = ShuffledSampler(len(dataset), rank=0, world_size=1)
    loader = image_loader(dataset, sampler, 8, crop=RandomResizedCrop(16), transform=None, on_error="skip")
    monkeypatch.setattr(CachedShard, "has", lambda file, blocks: False)  # removed as soon as it has come
    with pytest.raises(StoreError, match=r"removed from the cache .* 20 times .*Remote\(cache_gb="):
        next(iter(loader))


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


def test_wrong_arguments_are_named(packed, remote, tmp_path):
    for wrong in ({"cache_gb": 0}, {"deadline": -1}, {"num_requests": 0}, {"lookahead": -1}):
        with pytest.raises(ConfigurationError, match=f"Remote\\({next(iter(wrong))}="):
            Remote(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="is a folder, expected a URL"):
        ShardDataset(packed, remote=remote)
    with pytest.raises(ConfigurationError, match="lightning-ring\\[remote\\]"):
        ShardDataset("nonsense://bucket/photos", remote=remote)
    with pytest.raises(ConfigurationError, match="names of objects can be appended"):
        ShardDataset("https://example.invalid/photos?token=secret", remote=remote)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"Remote\(cache=...\) takes another folder"):
        ShardDataset("memory://photos", remote=Remote(cache=tmp_path / "file" / "cache"))


def test_any_file_system_of_fsspec_will_do(packed, remote, everything):
    import fsspec

    memory = fsspec.filesystem("memory")  # one that is not asynchronous
    memory.put(str(packed), "/photos", recursive=True)
    try:
        assert ShardDataset("memory://photos", remote=remote).read_many(range(len(everything))) == everything
    finally:
        memory.rm("/photos", recursive=True)


def test_generations_and_expressions_are_those_of_the_folder(packed, tmp_path, remote):
    shutil.copytree(packed, folder := tmp_path / "set")
    names = [ShardDataset(folder).name(i) for i in (3, 40, 79)]
    with serve(folder) as server:
        before = opened(server, remote)
        assert delete_images(folder, names=names).generation == 1
        for now, local in (
            (opened(server, remote), ShardDataset(folder, decode=False)),
            (before.at(None), ShardDataset(folder, decode=False)),
            (before, ShardDataset(folder, decode=False, generation=0)),
            (pickle.loads(pickle.dumps(before)), ShardDataset(folder, decode=False, generation=0)),
            (
                ShardDataset(server.url, decode=False, remote=remote, generation=0, where="label > 0"),
                ShardDataset(folder, decode=False, generation=0, where="label > 0"),
            ),
        ):
            order = shuffled(len(local))
            assert (len(now), now.generation, now.fingerprint) == (len(local), local.generation, local.fingerprint)
            assert now.read_many(order) == local.read_many(order)
            assert [now.key(i) for i in order[:3]] == [local.key(i) for i in order[:3]]
            now.will_need(order[:5])
        copied = {path.name for path in Path(str(remote.cache)).rglob("*")}
        assert not copied & {"report.csv", "stamps.npy", "deleted.json"}  # nothing that reads needs them
        with pytest.raises(ShardError, match=r"has no generation 7: .*index/000007/manifest.json cannot be read"):
            ShardDataset(server.url, remote=remote, generation=7)


def test_neighbours_come_in_one_request_up_to_a_limit():
    units = [(1, 5), (0, 2), (1, 6), (1, 4), (1, 9), (0, 3)]
    assert list(_neighbours(units, 8)) == [(1, range(4, 7)), (0, range(2, 4)), (1, range(9, 10))]
    runs = list(_neighbours([(0, i) for i in shuffled(50)], 8))
    assert sorted(i for _, run in runs for i in run) == list(range(50))
    assert max(len(run) for _, run in runs) <= 8


def test_errors_are_ours():
    assert issubclass(StoreError, RingError)
    assert not issubclass(StoreError, ShardError)
