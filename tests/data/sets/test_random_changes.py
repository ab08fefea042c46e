"""Random changes of a set, beside a dict that is changed in the same way."""

from __future__ import annotations

import random

import pytest

from lightning_ring.data.sets.change import delete_images, relabel_images
from lightning_ring.data.sets.compact import compact_set
from lightning_ring.data.sets.merge import merge_sets
from lightning_ring.data.sets.prune import prune_set
from lightning_ring.data.shards.manifest import generations, read_manifest
from lightning_ring.data.shards.verify import verify
from tests.data.sets.daily import draw, images_of, pack

CHANGES = ("append", "append", "delete", "delete", "relabel", "compact", "prune", "merge", "restore", "again")
STEPS = 20


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_a_set_is_what_its_changes_make_of_it_in_any_order(tmp_path, seed):
    draws, target = random.Random(seed), tmp_path / "set"
    images, deleted, were = {}, {}, {}

    def drawn(number, name):
        names = {f"{draws.choice('abc')}/{name} {i}.jpg": 100 * number + i for i in range(draws.randrange(3, 9))}
        folder = draw(tmp_path / name, names)
        return folder, {name: (name[0], (folder / name).read_bytes()) for name in names}

    for number in range(STEPS):
        change = draws.choice(CHANGES) if number else "append"
        some = draws.sample(sorted(images), min(3, len(images) - 1)) if images else []
        if change in ("append", "merge"):
            folder, new = drawn(number, f"day {number}")
            pack(folder, target if change == "append" else tmp_path / f"other {number}")
            if change == "merge":
                gone = min(new)
                delete_images(tmp_path / f"other {number}", names=[gone])
                deleted[gone] = folder, new.pop(gone)
                merge_sets([tmp_path / f"other {number}"], target)
            images |= new
        elif change == "delete" and some:
            delete_images(target, names=some)
            for name in some:
                deleted[name] = tmp_path / name.split("/")[1].rsplit(" ", 1)[0], images.pop(name)
        elif change == "relabel" and some:
            labels = {name: draws.choice("abc") for name in some}
            relabel_images(target, labels, new_classes=True)
            images |= {name: (label, images[name][1]) for name, label in labels.items()}
        elif change == "compact":
            compact_set(target)
            assert not any(shard.deleted for shard in read_manifest(target).shards)
        elif change == "prune":
            prune_set(target, keep=2)
            were = {generation: was for generation, was in were.items() if generation in generations(target)}
        elif change == "restore" and deleted:
            folder = deleted[min(deleted)][0]
            pack(folder, target, restore=True, keep_known=True)
            for name in [name for name, (of, _) in deleted.items() if of == folder]:
                images[name] = name[0], deleted.pop(name)[1][1]
        elif change == "again" and deleted:
            pack(deleted[min(deleted)][0], target, keep_known=True)  # deleted images stay deleted
        were[read_manifest(target).generation] = dict(images)
        for generation, was in were.items():
            assert images_of(target, generation=generation) == was, change
        assert verify(target, 1, lambda *numbers: None) == []
