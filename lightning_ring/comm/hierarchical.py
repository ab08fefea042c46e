"""Several nodes with several ranks each: node first, then across nodes, so that every byte crosses the wire once.

An all-reduce is three collectives in a row: a reduce-scatter among the ranks of a node, an all-reduce of each rank's
part with its peers on the other nodes, an all-gather in the node. Of M hosts each then sends 2·(M−1)/M of the tensor,
where one ring over all ranks, placed round-robin, sends as much from every rank. Source: the 2D-torus all-reduce of
Mikami et al., "Massively distributed SGD: ImageNet/ResNet-50 training in a flash" (2018), arXiv:1811.05233.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_ring.comm import ring
from lightning_ring.comm.agreement import describe
from lightning_ring.comm.collective_thread import CollectiveThread
from lightning_ring.comm.communicator import Communicator, CompletedWork, ReduceOp, Work, shard
from lightning_ring.comm.cost import LEAST_PIECE_BYTES, num_nested_pieces
from lightning_ring.comm.lane import Lane
from lightning_ring.comm.padded_rows import Rows
from lightning_ring.comm.pipeline import Journey, Passage, nothing
from lightning_ring.comm.ring_communicator import DIRECT_BYTES, RingCommunicator, Transport, check_rank, contiguous_flat
from lightning_ring.comm.waiting import Patience


class HierarchicalCommunicator(RingCommunicator):
    """CPU tensors between nodes that hold equally many ranks, from communicators over parts of the ranks.

    NCCL arranges its rings and trees by node itself, so there is no such thing for CUDA.

    Calls are agreed on, and small tensors and objects travel, over ``transport``, between all ranks. Large tensors are
    cut into pieces which follow each other through three stages, so that one piece, or one bucket, is reduced in the
    node while another one is on the wire. Each stage has a communicator and hence an order of its own: which of two
    pieces enters its last stage before which enters its first differs from rank to rank.

    Args:
        transport: Between all ranks.
        inward, outward: Two communicators over the same ranks, those of this rank's node.
        across: Over this rank's peers, one on each node.
        peers: By local rank, which ranks ``across`` joins, in its order; the same list on every rank.
        patience: Shared with the three, so that the first error ends what all of them have under way.
        piece_bytes: Size of a piece; by default that of an all-reduce follows from its size and the number of nodes
            (`num_nested_pieces`).
    """

    def __init__(
        self,
        transport: Transport,
        inward: Communicator,
        outward: Communicator,
        across: Communicator,
        peers: Sequence[Sequence[int]],
        patience: Patience,
        *,
        piece_bytes: int | None = None,
    ) -> None:
        super().__init__(transport, patience)
        self._inward = inward
        self._outward = outward
        self._across = across
        self._peers = [list(ranks) for ranks in peers]
        self._piece_bytes = piece_bytes
        self._onto_the_wire = CollectiveThread(patience)
        self._off_the_wire = CollectiveThread(patience)
        self._threads += [self._onto_the_wire, self._off_the_wire]

    @property
    def shard_index(self) -> int:
        return self._inward.rank * self._across.world_size + self._across.rank

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory: list[Tensor] = []

        def make() -> Work:  # in the thread that calls `inward`, whose calls come in one order on all ranks
            memory.append(self._inward.empty(numel, dtype, device))
            return CompletedWork()

        self._send(describe("empty", dtype, f"{numel} elements"), lambda: [Passage(inward=make)]).wait()
        return memory[0]

    def all_reduce_(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        if tensor.nbytes * (self.world_size - 1) <= DIRECT_BYTES:
            return super().all_reduce_(tensor, op=op, name=name)
        flat = contiguous_flat(tensor, "all_reduce_")
        ring.check_reducible(flat, op)
        what = describe("all_reduce", op.value, flat.dtype, f"{flat.numel()} elements", name=name)
        nested = _nested_op(op, flat.dtype)

        def passage(piece: Tensor) -> Passage:
            own = shard(piece, self._inward.world_size, self._inward.rank)
            return Passage(
                inward=lambda: self._inward.reduce_scatter_(piece, op=nested, name=name),
                across=lambda: self._across.all_reduce_(own, op=nested, name=name),
                arrived=lambda: self._finish_(own, op, nested),
                outward=lambda: self._outward.all_gather_(piece, name=name),
            )

        local_size, num_nodes = self._inward.world_size, self._across.world_size
        count = num_nested_pieces(flat.nbytes, local_size, num_nodes)
        return self._send(what, lambda: [passage(piece) for piece in self._pieces(flat, count)])

    def reduce_scatter_(self, flat: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        flat = contiguous_flat(flat, "reduce_scatter_")
        ring.check_reducible(flat, op)
        what = describe("reduce_scatter", op.value, flat.dtype, f"{flat.numel()} elements", name=name)
        nested = _nested_op(op, flat.dtype)
        rows = Rows(flat, self.world_size)

        def passages() -> list[Passage]:
            rows.load()
            of_node = shard(rows.flat, self._inward.world_size, self._inward.rank)
            return [
                Passage(
                    inward=lambda: self._inward.reduce_scatter_(rows.flat, op=nested, name=name),
                    across=lambda: self._across.reduce_scatter_(of_node, op=nested, name=name),
                    arrived=lambda: self._finish_(rows[self.shard_index], op, nested),
                )
            ]

        return self._send(what, passages, finish=lambda: rows.store(self.shard_index))

    def all_gather_(self, flat: Tensor, *, name: str = "") -> Work:
        flat = contiguous_flat(flat, "all_gather_")
        what = describe("all_gather", flat.dtype, f"{flat.numel()} elements", name=name)
        rows = Rows(flat, self.world_size)

        def passages() -> list[Passage]:
            rows.load(self.shard_index)
            of_node = shard(rows.flat, self._inward.world_size, self._inward.rank)
            return [
                Passage(
                    across=lambda: self._across.all_gather_(of_node, name=name),
                    outward=lambda: self._outward.all_gather_(rows.flat, name=name),
                )
            ]

        return self._send(what, passages, finish=rows.store)

    def broadcast_(self, tensor: Tensor, *, src: int = 0, name: str = "") -> Work:
        if tensor.nbytes <= DIRECT_BYTES:
            return super().broadcast_(tensor, src=src, name=name)
        flat = contiguous_flat(tensor, "broadcast_")
        check_rank(src, self.world_size, "src")
        what = describe("broadcast", f"from rank {src}", flat.dtype, f"{flat.numel()} elements", name=name)
        local_rank = next(index for index, ranks in enumerate(self._peers) if src in ranks)
        position = self._peers[local_rank].index(src)

        def across(piece: Tensor) -> Work:
            if self._inward.rank != local_rank:
                return CompletedWork()
            return self._across.broadcast_(piece, src=position, name=name)

        def passage(piece: Tensor) -> Passage:
            return Passage(
                across=lambda: across(piece),
                outward=lambda: self._outward.broadcast_(piece, src=local_rank, name=name),
            )

        count = ring.num_pieces(flat.numel(), flat.element_size(), LEAST_PIECE_BYTES)
        return self._send(what, lambda: [passage(piece) for piece in self._pieces(flat, count)])

    def close(self) -> None:
        if not self._closed:
            super().close()
            for level in (self._inward, self._across, self._outward):
                level.close()

    def _send(self, what: str, passages: Callable[[], list[Passage]], finish: Callable[[], object] = nothing) -> Work:
        journey = Journey(self._patience, finish)

        def run(_: Lane) -> None:
            *pieces, last = passages()
            for piece in pieces:
                self._enter(what, piece, None)
            self._enter(what, last, journey)

        journey.agreed = self._start(what, run)
        return journey

    def _enter(self, what: str, passage: Passage, journey: Journey | None) -> None:
        """Two threads move the piece on from stage to stage. With the last piece of all goes the ``journey``."""

        def onto_the_wire() -> None:
            passage.inward().wait()
            across = passage.across()
            self._off_the_wire.submit(what, lambda: off_the_wire(across))

        def off_the_wire(across: Work) -> None:
            across.wait()
            passage.arrived()
            outward = passage.outward()
            if journey is not None:
                journey.is_leaving(outward)

        self._onto_the_wire.submit(what, onto_the_wire)

    def _pieces(self, flat: Tensor, count: int) -> list[Tensor]:
        if self._piece_bytes is not None:
            count = ring.num_pieces(flat.numel(), flat.element_size(), self._piece_bytes)
        return ring.cut(flat, count)

    def _finish_(self, own: Tensor, op: ReduceOp, nested: ReduceOp) -> None:
        if nested is not op:
            ring.finish_(own, op, self.world_size)


def _nested_op(op: ReduceOp, dtype: torch.dtype) -> ReduceOp:
    """What each level does. An average divides once, after both; in 16 bits, where sums overflow, at each level."""
    return ReduceOp.SUM if op is ReduceOp.AVG and dtype not in (torch.float16, torch.bfloat16) else op
