"""Numbers of names, and which requests a mask tells: without ranks."""

from __future__ import annotations

import pytest
import torch

from lightning_ring.horovod.execution import Agreed, batches
from lightning_ring.horovod.pending import HEAD, NO_NEWS, STAYS, UNNAMED, Pending
from lightning_ring.horovod.requests import JOIN, Meta, Submission

SHORT = Meta("allreduce", ((3,),), (torch.float32,), "Sum")
LONG = SHORT._replace(shapes=((4,),))


def pending_of(*names: str) -> Pending:
    """With numbers for ``names``, which two ranks have agreed on."""
    pending = Pending(rank=0)
    for name in names:
        pending.number(name, {0: SHORT, 1: SHORT})
    return pending


def told(pending: Pending) -> tuple[int, int, list[int], list[str]]:
    mask, news = pending.tell(leaving=True)
    return mask[STAYS], mask[NO_NEWS], list(mask[HEAD:]), [request.name for request in news]


def test_requests_are_told_by_number_or_by_name() -> None:
    pending = pending_of("a", "b")
    requests = [Submission("a", SHORT), Submission("b", LONG), Submission("new", SHORT)]
    for request in requests:
        pending.add(request)
    assert told(pending) == (1, 0, [1, 0], ["b", "new"])
    assert told(pending) == (1, 1, [1, 0], [])
    with pytest.raises(
        ValueError, match=r"new: a collective of this name was submitted and is not done yet"
    ):
        pending.add(Submission("new", SHORT))
    pending.forget("a")
    assert told(pending) == (1, 0, [0, 0], ["a"])
    pending.finish(["a", "b", "new"])
    assert all(request.done for request in requests)
    assert told(pending)[0] == 0


def test_numbers_are_given_again_but_not_to_names_that_change() -> None:
    pending = pending_of("a", "b")
    assert pending.takes_number("a")
    assert not pending.takes_number(f"allreduce.{UNNAMED}3")
    pending.forget("a", changed=True)
    assert not pending.takes_number("a")
    pending.number("c", {0: SHORT, 1: SHORT})
    assert pending.agreed(0)[0] == "c"
    pending.add(Submission("c", SHORT))
    assert told(pending)[2] == [1, 0]


def test_a_rank_that_joins_tells_by_name_what_is_pending() -> None:
    pending = pending_of("a")
    pending.add(Submission("a", SHORT))
    pending.add(Submission(JOIN, Meta(JOIN)))
    assert told(pending) == (1, 0, [0], ["a", JOIN])


def test_short_tensors_of_one_kind_travel_together() -> None:
    metas = {
        "empty": SHORT._replace(shapes=((0,),)),
        "group": SHORT._replace(shapes=((2**20,), (1,)), dtypes=(torch.float32,) * 2),
        "half": SHORT._replace(dtypes=(torch.float16,)),
        "short": SHORT,
        "rows": SHORT._replace(kind="allgather"),
        "most": SHORT._replace(op="Max"),
    }
    found = batches([Agreed(name, {0: meta}) for name, meta in metas.items()])
    assert [[(part.one.name, part.position) for part in batch] for batch in found] == [
        [("empty", 0), ("group", 1), ("short", 0)],
        [("group", 0)],
        [("half", 0)],
        [("rows", 0)],
        [("most", 0)],
    ]
