"""Gradients as signs.

Sources: Seide, Fu, Droppo, Li and Yu, "1-bit stochastic gradient descent and its application to
    data-parallel
distributed training of speech DNNs" (2014); Tang et al., "1-bit Adam: communication efficient
large-scale training with Adam's convergence speed" (2021), arXiv:2102.02888, algorithm 1 (errors on
both legs).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_ring.comm.communicator import ChainedWork, Communicator, Work
from lightning_ring.gradients.compression.between_nodes import MIN_NUMEL, BetweenNodes, Part
from lightning_ring.gradients.compression.blocks import (
    BLOCK,
    BlockCode,
    aligned_shard,
    average_in_two_legs,
    rows_of,
)
from lightning_ring.gradients.compression.compressor import GradientLayout, bounds_of
from lightning_ring.gradients.compression.error_feedback import ErrorFeedback, NamedBuffers

# times 8 bytes that are 0 or 1: their bits in the highest byte, the first one lowest
_GATHER = 0x0102040810204080


class Signs(BetweenNodes):
    """Signs with a scale for each block of 256: C(x) = mean|x| · sign(x), with sign(0) = 1.

    Each owner of a shard keeps its error d of the second leg: it sends C(a + d) for the average a
    of what arrived, and d becomes a + d − C(a + d). The errors of the first leg are for
    `ErrorFeedback`.
    """

    name = "onebit"

    def __init__(self, min_numel: int = MIN_NUMEL) -> None:
        super().__init__(min_numel)
        self._server = NamedBuffers()
        # flat tensors whose shards may hold errors of other owners' shards
        self._moved: set[Tensor] = set()

        # between gradients, where a sign is not 0
        self._gaps: dict[Tensor, list[tuple[int, int]]] = {}

    def prepare(self, flat: Tensor, layout: GradientLayout) -> None:
        self._server.prepare(flat, layout)
        self._moved.add(flat)
        bounds = [(0, 0), *bounds_of(flat, layout), (flat.numel(), flat.numel())]
        self._gaps[flat] = [(end, start) for (_, end), (start, _) in pairwise(bounds)]

    def forget_tensors(self) -> None:
        self._server.forget_tensors()
        self._moved.clear()
        self._gaps.clear()

    def start_again(self) -> None:
        self._server.start_again()

    def all_reduce(
        self, flat: Tensor, comm: Communicator, *, lost: Tensor | None = None, name: str = ""
    ) -> Work:
        keep_unused = self._server.keep_unused(flat)
        if flat in self._moved and comm.is_nested:  # which part is this rank's is not known here
            server = self._server[flat]
            flat.add_(server, alpha=comm.world_size)
            server.zero_()

        def arrived() -> None:
            keep_unused()
            if all(
                self._server.layout(flat).contributed
            ):  # else what is owed elsewhere is still there
                self._moved.discard(flat)

        return ChainedWork(super().all_reduce(flat, comm, lost=lost, name=name), arrived)

    def average(self, part: Part) -> Iterator[Work]:
        server = part.of(self._server[part.whole])
        # buckets were built anew: what is owed elsewhere travels with the gradients
        if part.whole in self._moved:
            others = server.clone()
            aligned_shard(others, part.group.world_size, part.group.shard_index).zero_()
            part.values.add_(others, alpha=part.group.world_size)
            server.sub_(others)
        gaps = part.cut(self._gaps[part.whole])
        for tensor in (part.values, server):
            torch._foreach_zero_([tensor[start:end] for start, end in gaps] or [tensor[:0]])
        return average_in_two_legs(part, SIGNS, server)

    def state_dict(self, comm: Communicator) -> dict[str, Any]:
        return {"server": self._server.state(comm, "owner's error")}

    def load_state_dict(self, state: dict[str, Any], rank: int, world_size: int) -> str | None:
        # else `ErrorFeedback` says that errors start again
        if self._server.load(state["server"], rank, world_size):
            self._moved.update(self._gaps)  # an earlier release cut shards elsewhere
        return None


class OneBit(ErrorFeedback):
    """``compression="onebit"``: `Signs` with error feedback on both legs, about 3.5 % of the bytes
    of float32.

    Each rank sends C(g + e) of its gradient g to the owners of the shards, and e becomes g + e −
    C(g + e). The early steps of a training, with large gradients, lose most: 1-bit Adam sends them
    whole.

    Args:
        min_numel: As of `BetweenNodes`.
    """

    def __init__(self, min_numel: int = MIN_NUMEL) -> None:
        super().__init__(Signs(min_numel))


def encode_signs(values: Tensor, bits: Tensor, scales: Tensor) -> None:
    """Write mean|x| of each block x to ``scales``, and x ≥ 0 to ``bits``, the first value in the
    lowest of a byte.
    """
    for first, rows in rows_of(values):
        missing = BLOCK - rows.shape[1]
        whole = pad(rows, (0, missing)) if missing else rows
        scale = scales[first : first + len(rows)]
        torch.mean(whole.abs(), dim=1, out=scale)
        if missing:  # the mean of the values that are there
            scale.mul_(BLOCK / rows.shape[1])
        words = whole.ge(0).view(torch.int64)
        words.mul_(_GATHER).bitwise_right_shift_(56)
        bits[first * BLOCK // 8 :][: words.numel()].copy_(words.view(-1))


def decode_signs(values: Tensor, bits: Tensor, scales: Tensor) -> None:
    """Replace ``values`` by the scale of their block if their bit is set, else by its opposite."""
    bytes_ = torch.arange(256, device=values.device).unsqueeze(1)
    places = torch.arange(8, device=values.device)
    signs = ((bytes_ >> places) & 1).float().mul_(2).sub_(1)  # of each byte
    for first, rows in rows_of(values):
        whole = rows if rows.shape[1] == BLOCK else rows.new_empty(1, BLOCK)
        packed = bits[first * BLOCK // 8 :][: whole.numel() // 8].view(torch.uint8).int()
        torch.index_select(signs, 0, packed, out=whole.view(-1, 8))
        whole.mul_(scales[first : first + len(rows)].unsqueeze(1))
        if whole is not rows:
            rows.copy_(whole[:, : rows.shape[1]])


SIGNS = BlockCode(BLOCK // 8, encode_signs, decode_signs, "signs")
