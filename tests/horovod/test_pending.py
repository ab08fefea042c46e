"""Numbers of names, and which requests a mask tells: without ranks."""

import torch

from lightning_ring.horovod.execution import batches
from lightning_ring.horovod.requests import Meta

SHORT = Meta("allreduce", ((3,),), (torch.float32,), "Sum")


def test_short_tensors_of_one_kind_travel_together():
    metas = {
        "empty": SHORT._replace(shapes=((0,),)),
        "group": SHORT._replace(shapes=((2**20,), (1,)), dtypes=(torch.float32,) * 2),
        "half": SHORT._replace(dtypes=(torch.float16,)),
        "short": SHORT,
        "rows": SHORT._replace(kind="allgather"),
        "most": SHORT._replace(op="Max"),
    }
    found = batches({name: {0: meta} for name, meta in metas.items()})
    assert [[(part.name, part.position) for part in batch] for batch in found] == [
        [("empty", 0), ("group", 1), ("short", 0)],
        [("group", 0)],
        [("half", 0)],
        [("rows", 0)],
        [("most", 0)],
    ]
