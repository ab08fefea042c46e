"""Several nodes with several ranks each: node first, then across nodes, so that every byte crosses
the wire once.

An all-reduce is three collectives in a row: a reduce-scatter among the ranks of a node, an
all-reduce of each rank's part with its peers on the other nodes, an all-gather in the node. Of M
hosts each then sends 2·(M−1)/M of the tensor, where one ring over all ranks, placed round-robin,
sends as much from every rank. Source: the 2D-torus all-reduce of Mikami et al., "Massively
distributed SGD: ImageNet/ResNet-50 training in a flash" (2018), arXiv:1811.05233.

- One agreement over a transport between all ranks, which also carries small tensors and objects.
  The levels over MPI and Gloo exchange no headers of their own.
- Three stages, each begun first in, first out: a piece is reduced in the node while another one is
  on the wire. The first and the last stage have a communicator each over the same ranks and memory.
  The order of their pieces differs from rank to rank, and one queue for both would deadlock.
- The first error ends every collective under way, on all levels.
- A bucket is cut into pieces (`comm.cost.num_nested_pieces`), none smaller than 4 MiB. All ranks
  must cut alike before anything is measured, so typical links are assumed.
- Rank r holds shard ``shard_index``, local rank first. A length that the world size does not divide
  is sent as a padded copy.
- Flat rings remain for nodes of different sizes, and for GPUs, where NCCL arranges its own rings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from lightning_ring.comm import ring
from lightning_ring.comm.calls import check_rank, contiguous_flat, describe, of_tensor
from lightning_ring.comm.collective_thread import CollectiveThread
from lightning_ring.comm.communicator import Communicator, CompletedWork, ReduceOp, Work, shard
from lightning_ring.comm.cost import LEAST_PIECE_BYTES, num_nested_pieces
from lightning_ring.comm.ring import PaddedRows
from lightning_ring.comm.ring_communicator import DIRECT_BYTES, Channel, RingCommunicator
from lightning_ring.comm.transport import Transport
from lightning_ring.comm.waiting import CHECK_SECONDS, WaitPolicy, nothing

Stage = Callable[[], Work]


@dataclass(frozen=True, slots=True)
class _PieceStages:
    """The stages of one piece: within the node, across nodes, and within the node again.

    Each function starts a collective; ``after_across`` is called between the last two.
    """

    intra_first: Stage = CompletedWork
    across: Stage = CompletedWork
    after_across: Callable[[], object] = nothing
    intra_last: Stage = CompletedWork


class _PipelinedWork:
    """The `Work` of a tensor whose pieces pass through the stages. ``finish`` is run once, by
    the first `wait`.
    """

    def __init__(self, policy: WaitPolicy, finish: Callable[[], object]) -> None:
        self.agreed: Work = CompletedWork()  # ends once the ranks have agreed on the call
        self._policy = policy
        self._finish = finish
        self._finishing = threading.Lock()
        self._last_stages: list[Work] = []
        self._all_started = threading.Event()

    def add_last_stage(self, work: Work, is_last_piece: bool) -> None:
        """``work`` is a piece's last stage. All are waited for: over several channels a later piece
        may end before an earlier one.
        """
        self._last_stages.append(work)
        if is_last_piece:
            self._all_started.set()

    @property
    def ended(self) -> float | None:
        if not self._all_started.is_set():
            return None
        times = [getattr(work, "ended", None) for work in self._last_stages]
        return max((time for time in times if time is not None), default=None)

    def wait(self) -> None:
        self.agreed.wait()
        while not self._all_started.wait(CHECK_SECONDS):
            self._policy.check_peers()
            if self._policy.error is not None:
                self._policy.raise_named(self._policy.error)
        for work in self._last_stages:
            work.wait()
        with self._finishing:
            self._finish()
            self._finish = nothing

    def done(self) -> bool:
        return self._policy.error is not None or (
            self._all_started.is_set() and all(work.done() for work in self._last_stages)
        )


class HierarchicalCommunicator(RingCommunicator):
    """CPU tensors between nodes that hold equally many ranks, from communicators over parts of the
    ranks.

    NCCL arranges its rings and trees by node itself, so there is no such thing for CUDA.

    Calls are agreed on, and small tensors and objects travel, over ``transport``, between all
    ranks. Large tensors are cut into pieces which follow each other through three stages, so that
    one piece, or one bucket, is reduced in the node (``intra_first``, ``intra_last``) while another
    one is on the wire (``across``: this rank's peers, one on each node). Each stage has a
    communicator and hence an order of its own: which of two pieces enters its last stage before
    which enters its first differs from rank to rank.

    ``peers`` tells, by local rank, which ranks ``across`` joins, in its order; the same list on
    every rank. ``policy`` is shared with the three, so that the first error ends what all of them
    have under way. The size of an all-reduce's pieces follows from its own and the number of nodes
    (`num_nested_pieces`).
    """

    def __init__(
        self,
        transport: Transport,
        intra_first: Communicator,
        intra_last: Communicator,
        across: Communicator,
        peers: Sequence[Sequence[int]],
        policy: WaitPolicy,
    ) -> None:
        super().__init__(transport, policy)
        self._intra_first = intra_first
        self._intra_last = intra_last
        self._across = across
        self._peers = [list(ranks) for ranks in peers]
        by_shard = list(chain.from_iterable(peers))  # local rank first
        self._shard_indices = [by_shard.index(rank) for rank in range(len(by_shard))]
        self._before_across = CollectiveThread(policy)
        self._after_across = CollectiveThread(policy)
        self._threads += [self._before_across, self._after_across]

    @property
    def shard_indices(self) -> Sequence[int]:
        return self._shard_indices

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory: list[Tensor] = []

        # in the thread that calls `intra_first`, whose calls come in one order on all ranks
        def make() -> Work:
            memory.append(self._intra_first.empty(numel, dtype, device))
            return CompletedWork()

        what = describe("empty", dtype, f"{numel} elements")
        self._send(what, [_PieceStages(intra_first=make)]).wait()
        return memory[0]

    def all_reduce_(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        if tensor.nbytes * (self.world_size - 1) <= DIRECT_BYTES:
            return super().all_reduce_(tensor, op=op, name=name)
        flat = contiguous_flat(tensor, "all_reduce_")
        ring.check_reducible(flat, op)
        what = of_tensor("all_reduce", flat, name, op.value)
        nested = _nested_op(op, flat.dtype)

        def stages(piece: Tensor) -> _PieceStages:
            own = shard(piece, self._intra_first.world_size, self._intra_first.rank)
            return _PieceStages(
                intra_first=lambda: self._intra_first.reduce_scatter_(piece, op=nested, name=name),
                across=lambda: self._across.all_reduce_(own, op=nested, name=name),
                after_across=lambda: ring.finish_(own, op, self.world_size),
                intra_last=lambda: self._intra_last.all_gather_(piece, name=name),
            )

        local_size, num_nodes = self._intra_first.world_size, self._across.world_size
        count = num_nested_pieces(flat.nbytes, local_size, num_nodes)
        return self._send(what, [stages(piece) for piece in ring.cut(flat, count)])

    def reduce_scatter_(self, flat: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        flat = contiguous_flat(flat, "reduce_scatter_")
        ring.check_reducible(flat, op)
        what = of_tensor("reduce_scatter", flat, name, op.value)
        nested = _nested_op(op, flat.dtype)
        rows = PaddedRows(flat, self.world_size)
        of_node = shard(rows.flat, self._intra_first.world_size, self._intra_first.rank)
        stages = _PieceStages(
            intra_first=lambda: self._intra_first.reduce_scatter_(rows.flat, op=nested, name=name),
            across=lambda: self._across.reduce_scatter_(of_node, op=nested, name=name),
            after_across=lambda: ring.finish_(rows[self.shard_index], op, self.world_size),
        )
        return self._send(what, [stages], rows.load, lambda: rows.store(self.shard_index))

    def all_gather_(self, flat: Tensor, *, name: str = "") -> Work:
        flat = contiguous_flat(flat, "all_gather_")
        what = of_tensor("all_gather", flat, name)
        rows = PaddedRows(flat, self.world_size)
        of_node = shard(rows.flat, self._intra_first.world_size, self._intra_first.rank)
        stages = _PieceStages(
            across=lambda: self._across.all_gather_(of_node, name=name),
            intra_last=lambda: self._intra_last.all_gather_(rows.flat, name=name),
        )
        return self._send(what, [stages], lambda: rows.load(self.shard_index), rows.store)

    @property
    def is_nested(self) -> bool:
        return True

    def average_by(
        self, flat: Tensor, average: Callable[[Tensor, Communicator], Work], *, name: str = ""
    ) -> Work:
        flat = contiguous_flat(flat, "average_by")
        what = of_tensor("average_by", flat, name)
        part = shard(flat, self._intra_first.world_size, self._intra_first.rank)

        def across() -> Work:
            # To its end: `average` may start several collectives, which must not mix with those of
            # the next tensor.
            average(part, self._across).wait()
            return CompletedWork()

        stages = _PieceStages(
            intra_first=lambda: self._intra_first.reduce_scatter_(flat, op=ReduceOp.AVG, name=name),
            across=across,
            intra_last=lambda: self._intra_last.all_gather_(flat, name=name),
        )
        return self._send(what, [stages])

    def broadcast_(self, tensor: Tensor, *, src: int = 0, name: str = "") -> Work:
        if tensor.nbytes <= DIRECT_BYTES:
            return super().broadcast_(tensor, src=src, name=name)
        flat = contiguous_flat(tensor, "broadcast_")
        check_rank(src, self.world_size, "src")
        what = of_tensor("broadcast", flat, name, f"from rank {src}")
        local_rank = next(index for index, ranks in enumerate(self._peers) if src in ranks)
        position = self._peers[local_rank].index(src)

        def across(piece: Tensor) -> Work:
            if self._intra_first.rank != local_rank:
                return CompletedWork()
            return self._across.broadcast_(piece, src=position, name=name)

        def stages(piece: Tensor) -> _PieceStages:
            return _PieceStages(
                across=lambda: across(piece),
                intra_last=lambda: self._intra_last.broadcast_(piece, src=local_rank, name=name),
            )

        count = ring.num_pieces(flat.numel(), flat.element_size(), LEAST_PIECE_BYTES)
        return self._send(what, [stages(piece) for piece in ring.cut(flat, count)])

    def close(self) -> None:
        if not self._closed:
            super().close()
            for level in (self._intra_first, self._across, self._intra_last):
                level.close()

    def _send(
        self,
        what: str,
        pieces: Sequence[_PieceStages],
        prepare: Callable[[], object] = nothing,
        finish: Callable[[], object] = nothing,
    ) -> Work:
        """``prepare`` is run once the ranks have agreed on the call."""
        work = _PipelinedWork(self._policy, finish)

        def run(_: Channel) -> None:
            prepare()
            for piece in pieces:
                self._start_stages(what, piece, work, is_last_piece=piece is pieces[-1])

        work.agreed = self._start(what, run)
        return work

    def _start_stages(
        self, what: str, piece: _PieceStages, work: _PipelinedWork, is_last_piece: bool
    ) -> None:
        """Two threads move ``piece`` from stage to stage."""

        def through_the_first() -> None:
            piece.intra_first().wait()
            across = piece.across()
            self._after_across.submit(what, lambda: through_the_others(across))

        def through_the_others(across: Work) -> None:
            across.wait()
            piece.after_across()
            work.add_last_stage(piece.intra_last(), is_last_piece)

        self._before_across.submit(what, through_the_first)


def _nested_op(op: ReduceOp, dtype: torch.dtype) -> ReduceOp:
    """What each level does. An average divides once, after both; in 16 bits, where sums
    overflow, at each level.
    """
    return ReduceOp.SUM if op is ReduceOp.AVG and not ring.divides_first(dtype) else op
