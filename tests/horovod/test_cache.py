"""Numbers of names, and which requests a mask tells: without ranks."""

from __future__ import annotations

import pytest
import torch

from lightning_ring.horovod import cache
from lightning_ring.horovod.cache import Cache
from lightning_ring.horovod.execution import Agreed, _batches
from lightning_ring.horovod.pending import HEAD, NO_NEWS, STAYS, Pending
from lightning_ring.horovod.requests import JOIN, Meta, Submission

SHORT = Meta("allreduce", torch.float32, (3,), "Sum")
LONG = SHORT._replace(shape=(4,))
MEMBER = SHORT._replace(group=("group", 2))


def test_numbers_are_given_again_and_groups_are_dropped_together() -> None:
    known = Cache(rank=0)
    for name, meta in {"a": SHORT, "group[0]": MEMBER, "group[1]": MEMBER, "b": SHORT}.items():
        known.add(name, {0: meta, 1: meta})
    assert [known.number(name, SHORT) for name in ("a", "b")] == [0, 3]
    assert known.number("a", LONG) is None
    assert known.drop("group[1]", changed=True) == ["group[0]", "group[1]"]
    assert not known.takes("group[0]", MEMBER)
    known.add("c", {0: SHORT, 1: SHORT})
    assert known.number("c", SHORT) in (1, 2)
    assert known.size == 4


def test_a_group_that_does_not_fit_is_not_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "CAPACITY", 1)
    assert Cache(0).takes("a", SHORT)
    assert not Cache(0).takes("group[0]", MEMBER)
    assert not Cache(0).takes(f"allreduce.{cache.UNNAMED}3", SHORT)


def test_requests_are_told_by_number_or_by_name() -> None:
    pending = Pending(rank=0)
    pending.number("a", {0: SHORT, 1: SHORT})
    again, new = Submission("a", SHORT), Submission("new", SHORT)
    pending.add([again, new])
    mask, news = pending.tell(leaving=False)
    assert (mask[STAYS], mask[NO_NEWS], mask[HEAD], news) == (1, 0, 1, [new])
    with pytest.raises(
        ValueError, match=r"new: a collective of this name was submitted and is not done yet"
    ):
        pending.add([Submission("other", SHORT), Submission("new", SHORT)])
    pending.add([Submission("other", SHORT)])  # it was not kept
    pending.forget("a")
    mask, news = pending.tell(leaving=True)
    assert (mask[STAYS], mask[HEAD], [request.name for request in news]) == (1, 0, ["other", "a"])
    pending.finish(["a", "new", "other"])
    assert again.done
    assert pending.tell(leaving=True)[0][STAYS] == 0


def test_a_rank_that_joins_tells_by_name_what_is_pending() -> None:
    pending = Pending(rank=0)
    pending.number("a", {0: SHORT, 1: SHORT})
    pending.add([Submission("a", SHORT)])
    pending.add([Submission(JOIN, Meta(JOIN))])
    mask, news = pending.tell(leaving=False)
    assert mask[HEAD] == 0
    assert {request.name for request in news} == {"a", JOIN}


def test_short_tensors_of_one_kind_travel_together() -> None:
    metas = {
        "empty": SHORT._replace(shape=(0,)),
        "long": SHORT._replace(shape=(2**20,)),
        "half": SHORT._replace(dtype=torch.float16),
        "short": SHORT,
        "rows": SHORT._replace(kind="allgather"),
        "most": SHORT._replace(op="Max"),
    }
    batches = _batches([Agreed(name, {0: meta}) for name, meta in metas.items()])
    assert [[one.name for one in batch] for batch in batches] == [
        ["empty", "short"],
        ["long"],
        ["half"],
        ["rows"],
        ["most"],
    ]
