"""Servers that delay, fail and lie: the right images, or an error that names the object."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_ring.data import RandomResizedCrop, ShuffledSampler, image_loader
from lightning_ring.data.shards.manifest import read_manifest
from lightning_ring.errors import RingError, ShardError, ShardLostError, StoreError
from tests.data.remote.faulty_server import serve
from tests.data.remote.sets import SMALL, opened, shuffled


def test_no_fault_of_the_server_gives_a_wrong_sample(server, remote, everything):
    faults = {"hang": 0.01, "unavailable": 0.08, "truncate": 0.08, "short": 0.04, "reset": 0.08, "flip": 0.03}
    played = set()
    for seed in range(20):
        if played == set(faults):
            break
        cache = Path(str(remote.cache)) / str(seed)
        dataset = opened(server, remote, cache=cache, cache_gb=SMALL, deadline=60, num_requests=8)
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


def test_an_outage_is_not_taken_for_broken_images(server, remote):
    dataset = opened(server, remote, cache_gb=SMALL, deadline=0.5)
    sampler = ShuffledSampler(len(dataset), rank=0, world_size=1)
    loader = image_loader(dataset, sampler, 8, crop=RandomResizedCrop(16), transform=None, on_error="skip")
    server.plant(dead=True)
    with pytest.raises(StoreError, match=r"could not be read in 0\.5 s"):
        next(iter(loader))


def test_a_missing_object_is_not_taken_for_broken_images(server, remote):
    dataset = opened(server, remote)
    sampler = ShuffledSampler(len(dataset), rank=0, world_size=1)
    server.plant(statuses={"shard-000001.tar": 404})
    for on_error in ("skip", "skip_shards"):
        loader = image_loader(dataset, sampler, 8, crop=RandomResizedCrop(16), transform=None, on_error=on_error)
        if on_error == "skip":
            with pytest.raises(ShardLostError, match=r"shard-000001\.tar, bytes .* it is not there"):
                list(loader)
        else:
            assert len(list(loader)) == len(dataset) / 8
            lost = sum(dataset._index.place(i).shard == 1 for i in range(len(dataset)))
            assert len(loader.maker.skipped.reasons) == lost > 0  # type: ignore[attr-defined]


def test_errors_are_ours():
    assert issubclass(StoreError, RingError)
    assert not issubclass(StoreError, ShardError)
