"""Parameters that tell of reads before they happen."""

from __future__ import annotations

import copy
import os
import threading
from typing import NamedTuple

import pytest
import torch
from torch.nn import Parameter

from lightning_ring.algorithms.sharded.intercept import intercepting_class


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@pytest.fixture
def param():
    """An intercepted parameter; its reads in the main thread are in ``param.reads``."""
    owner, reads = (os.getpid(), threading.get_ident()), []

    def before_read(read):
        if (os.getpid(), threading.get_ident()) == owner:
            reads.append(read)
            read.__class__ = Parameter

    param = Parameter(torch.ones(3))
    param.reads = reads
    param.__class__ = intercepting_class(before_read)
    return param


@pytest.mark.parametrize(
    "read",
    [
        torch.sum,
        torch.clone,
        lambda p: torch.cat(Pair(p, torch.zeros(3))),
        lambda p: torch.stack([p]),
        copy.deepcopy,
    ],
)
def test_a_read_is_told_once_and_gives_the_class_back(param, read):
    read(param)
    assert len(param.reads) == 1
    assert type(param) is Parameter


def test_a_description_is_no_read(param):
    assert (param.shape, param.dtype, param.grad, len(param)) == ((3,), torch.float32, None, 3)
    assert param.reads == []
    assert type(param) is not Parameter


def test_a_copy_made_in_another_thread_has_the_ordinary_class(param):
    copies = []
    thread = threading.Thread(target=lambda: copies.append(copy.deepcopy(param)))
    thread.start()
    thread.join(60)
    assert type(copies[0]) is Parameter
    assert torch.equal(copies[0], torch.ones(3))
