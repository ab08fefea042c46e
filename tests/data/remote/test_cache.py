"""The cache: shared by processes, bounded, mended where it is damaged."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_ring.data import RandomResizedCrop, Remote, ShardDataset, ShuffledSampler, image_loader
from lightning_ring.data.remote.cached_shard import BLOCK, CachedShard
from lightning_ring.data.remote.store import ObjectStore
from lightning_ring.errors import StoreError
from tests.data.remote.sets import SMALL, opened, shuffled, taken


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


def test_an_object_of_unknown_length_gets_room_too(packed, server, remote, tmp_path, monkeypatch):
    async def unknown(name: str) -> None:
        """Some servers do not say."""

    store, room = ObjectStore(server.url, remote), []
    monkeypatch.setattr(store, "size", unknown)
    store.submit(store.download, "manifest.json", tmp_path / "copy", room.append).result()
    assert (tmp_path / "copy").read_bytes() == (packed / "manifest.json").read_bytes()
    assert room == [(packed / "manifest.json").stat().st_size]


def test_a_set_larger_than_the_cache_is_read_sample_by_sample(packed, server, remote, everything):
    dataset = opened(server, remote, cache_gb=SMALL)
    server.plant()
    for i in (7, 100, 3):
        assert dataset.read(i) == everything[i]
    needed = sum(len(everything[i]) for i in (7, 100, 3))
    assert server.bytes_sent <= needed + 3 * 2 * BLOCK
    assert taken(Path(str(remote.cache))) < 2**20


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


@contextmanager
def _standing_still(children: list[Any]) -> Iterator[None]:
    for child in children:
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)  # it has stopped
    try:
        yield
    finally:
        for child in children:
            os.kill(child.pid, signal.SIGCONT)


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
            with _standing_still(
                children
            ):  # else what is removed during the walk, and what takes its place, both count
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


def test_a_cache_that_is_too_small_is_not_taken_for_broken_images(server, remote, monkeypatch):
    dataset = opened(server, remote)
    sampler = ShuffledSampler(len(dataset), rank=0, world_size=1)
    loader = image_loader(dataset, sampler, 8, crop=RandomResizedCrop(16), transform=None, on_error="skip")
    monkeypatch.setattr(CachedShard, "has", lambda file, blocks: False)  # removed as soon as it has come
    with pytest.raises(StoreError, match=r"removed from the cache .* 20 times .*Remote\(cache_gb="):
        next(iter(loader))
