"""A set at a URL is the set in its folder, for loaders, workers and other processes."""

from __future__ import annotations

import itertools
import pickle
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_ring.data import RandomResizedCrop, Remote, ShardDataset, ShuffledSampler, image_loader, item_loader
from lightning_ring.data.remote.files import _neighbours
from lightning_ring.data.sets.change import delete_images
from lightning_ring.errors import ConfigurationError, ShardError
from tests.data.remote.faulty_server import serve
from tests.data.remote.sets import SMALL, opened, shuffled


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
