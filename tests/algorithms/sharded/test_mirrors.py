"""Which rank contributes each shard when ranks have died."""

from __future__ import annotations

import pytest

from lightning_ring.algorithms.sharded.rebuilding import Standing, holders_of
from lightning_ring.errors import StateLostError


def standings(*places: int | None, of: int) -> list[Standing]:
    return [Standing(place, of if place is not None else 0) for place in places]


def test_each_shard_comes_from_its_rank_or_from_the_mirror_behind_it() -> None:
    assert holders_of(standings(0, 1, 2, of=3)) == [(0, False), (1, False), (2, False)]
    # the ranks at places 1 and 3 of 4 died, ranks have other numbers now, and one has just come
    assert holders_of(standings(2, None, 0, of=4)) == [(2, False), (0, True), (0, False), (2, True)]
    assert holders_of(standings(0, of=1)) == [(0, False)]


def test_a_shard_whose_rank_and_mirror_died_is_lost() -> None:
    with pytest.raises(StateLostError, match="1 of 4 shards"):
        holders_of(standings(0, 3, of=4))
