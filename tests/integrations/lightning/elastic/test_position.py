"""Where an elastic fit counts its samples from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lightning_ring.data import ShuffledSampler
from lightning_ring.integrations.lightning.elastic.position import TrainingPosition

BATCH = 4


def position(sampler: ShuffledSampler, epoch: int, batch_idx: int) -> TrainingPosition:
    """Of a fit whose loader reads ``sampler``, before batch ``batch_idx`` of the epoch."""
    loader = SimpleNamespace(sampler=sampler, batch_size=BATCH)
    loop: Any = SimpleNamespace(batch_idx=batch_idx)
    fit_loop = SimpleNamespace(_combined_loader=SimpleNamespace(flattened=[loader]), epoch_loop=loop)
    trainer: Any = SimpleNamespace(current_epoch=epoch, fit_loop=fit_loop)
    return TrainingPosition(trainer)


def test_a_fit_that_goes_on_within_an_epoch_counts_from_the_saved_position_with_the_ranks_there_are() -> None:
    saved = ShuffledSampler(400, rank=0, world_size=4)
    sampler = ShuffledSampler(400, rank=0, world_size=2)
    sampler.load_state_dict(saved.state_dict(trained=6 * BATCH) | {"epoch": 1})
    found = position(sampler, epoch=1, batch_idx=6)
    assert found.state_dict()["after"]["position"] == 6 * BATCH * 4  # if ranks change before its first step
    found.begin_step()
    found.end_step()
    assert found.state_dict()["after"]["position"] == 6 * BATCH * 4 + BATCH * 2
    assert found.state_dict()["after"]["taken"] == 7 * BATCH


def test_a_fit_that_begins_an_epoch_counts_from_its_start() -> None:
    sampler = ShuffledSampler(400, rank=0, world_size=2)
    sampler.load_state_dict(sampler.state_dict(trained=40))  # of the epoch before, which was not read to its end
    found = position(sampler, epoch=1, batch_idx=0)
    found.begin_step()
    found.end_step()
    assert found.state_dict()["after"]["position"] == BATCH * 2
