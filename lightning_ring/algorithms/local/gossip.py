"""Decentralised training: every rank averages its parameters with a few neighbours at each step.

Sources: Lian et al., "Can decentralized algorithms outperform centralized algorithms?" (2017),
    arXiv:1705.09056,
algorithm 1 (D-PSGD); Assran et al., "Stochastic gradient push for distributed deep learning"
(2019), arXiv:1811.10792, and Ying et al., "Exponential graph is provably efficient for
decentralized deep training" (2021), arXiv:2110.13363 (the one-peer exponential graph).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_ring.algorithms.local.local_sgd import LocalSGD
from lightning_ring.comm.communicator import ReduceOp, Work
from lightning_ring.comm.recording import unrecorded
from lightning_ring.errors import ConfigurationError
from lightning_ring.gradients.compression import Compressor

Topology = Literal["ring", "exponential", "pairs"]


class Gossip(LocalSGD):
    """At step k rank r, with parameters x_r and their gradient g_r, on the way while the batch is
    computed::

        x_r ← Σ_s W_rs · x_s      over the neighbours of r in step k, and r itself
        x_r ← the optimizer's step from there with g_r

    A step with a closure, as the Trainer's, computes the batch within itself: it is taken from x_r,
    and what the average changes is added behind it. Only what depends on x_r besides g_r, such as
    weight decay, tells the two apart.

    W has equal weights in each row, and rows and columns that add up to 1: the mean of all x moves
    as if gradients were averaged, and ranks differ by what the last steps have not spread yet. Each
    rank sends its parameters to one or two neighbours, whatever the number of ranks. Short messages
    still go to all of them, so that a slow rank slows all.

    Args:
        topology: ``"ring"``: both neighbours on a ring. ``"exponential"``: one rank, 1, 2, 4, ...
            further in turn, so that a value has come to all of N = 2^m ranks after m steps.
            ``"pairs"``: a partner drawn anew each step.
        seed: Of the pairs.
        warmup_steps, bucket_cap_mb, compression: As of `LocalSGD`: steps at the begin whose
            gradients are averaged.

    `metrics` has the ``consensus_distance``: the root mean square over the ranks of |x_r - mean of
    all x|, when `show_averages` ran last.

    Raises:
        ConfigurationError: An argument cannot work.
    """

    def __init__(
        self,
        topology: Topology = "ring",
        *,
        seed: int = 0,
        warmup_steps: int = 0,
        bucket_cap_mb: float | Literal["auto"] | None = None,
        compression: str | Compressor | None = None,
    ) -> None:
        super().__init__(
            1, warmup_steps=warmup_steps, bucket_cap_mb=bucket_cap_mb, compression=compression
        )
        if topology not in _NEIGHBOURS:
            raise ConfigurationError(
                f"Gossip got topology={topology!r}, expected one of "
                f"{', '.join(map(repr, _NEIGHBOURS))}."
            )
        self.topology = topology
        self.seed = seed
        self._consensus_distance: float | None = None
        self._under_way: _Exchange | None = None

    @property
    def steps_of_round(self) -> int:
        """1 from the first step after the warm-up on: the ranks' parameters are never the same
        again.
        """
        return int(self.num_steps > self.warmup_steps)

    def begin_batch(self, active_ranks: int | None = None) -> None:
        super().begin_batch(active_ranks)
        if (
            self.num_steps >= self.warmup_steps
            and self._under_way is None
            and self._communicator.world_size > 1
        ):
            self._under_way = self._send()

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        super().before_step(optimizer, has_closure=has_closure)
        if not has_closure:  # which is still to compute the batch while parameters travel
            self._mix(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        self._mix(optimizer)
        super().after_step(optimizer)

    def _mix(self, optimizer: Optimizer) -> None:
        if self._under_way is not None and self._steps_the_module(optimizer):
            under_way, self._under_way = self._under_way, None
            self._average(under_way)

    def detach(self, *, wait: bool = True) -> None:
        if self._under_way is not None and wait:
            self._under_way.wait()
        self._under_way = None
        super().detach(wait=wait)

    @torch.no_grad()
    def _send(self) -> _Exchange:
        comm, step = self._communicator, self.num_steps
        targets, sources = _NEIGHBOURS[self.topology](comm.rank, comm.world_size, step, self.seed)
        params = self._parameters()
        own = _flat(params)
        empty = own.new_empty(0)
        sent = [own if rank in targets else empty for rank in range(comm.world_size)]
        received = [
            torch.empty_like(own) if rank in sources else empty for rank in range(comm.world_size)
        ]
        stop = torch.tensor([float(self._asked_to_stop)])
        works = [
            comm.all_to_all(sent, received, name=f"step {step + 1}: parameters of neighbours"),
            unrecorded(comm).all_reduce_(
                stop, op=ReduceOp.MAX, name=f"step {step + 1}: requests to stop"
            ),
        ]
        return _Exchange(works, params, own, [received[rank] for rank in sources], stop)

    @torch.no_grad()
    def _average(self, under_way: _Exchange) -> None:
        under_way.wait()
        self._agreed_to_stop |= bool(under_way.stop > 0)
        params, own = under_way.params, under_way.own
        way = torch.stack([own, *under_way.received]).mean(0).sub_(own)
        parts = way.split([param.numel() for param in params])
        torch._foreach_add_(
            [*params], [part.view(param.shape) for part, param in zip(parts, params, strict=True)]
        )

    def _end_round(self) -> None:
        """Nothing: the step has averaged with the neighbours."""

    def show_averages(self) -> None:
        if self._own:
            return
        super().show_averages()
        if self._own:
            self._note_consensus_distance()

    def _note_consensus_distance(self) -> None:
        squares = [
            (own - param.detach()).square().sum(dtype=torch.float64)
            for param, own in self._own.items()
        ]
        mean = torch.stack(squares).sum().view(1).cpu()
        unrecorded(self._communicator).all_reduce_(
            mean, op=ReduceOp.AVG, name="consensus distance"
        ).wait()
        self._consensus_distance = math.sqrt(mean.item())

    def metrics(self) -> dict[str, float]:
        return (
            {}
            if self._consensus_distance is None
            else {"consensus_distance": self._consensus_distance}
        )

    def _exchange(self) -> str:
        return f"parameters are averaged with neighbours ({self.topology})"


class _Exchange(NamedTuple):
    """Parameters of this rank and of its neighbours, as one vector each, and whether some rank
    asks to stop.
    """

    works: list[Work]
    params: list[Parameter]
    own: Tensor
    received: list[Tensor]
    stop: Tensor

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _on_ring(rank: int, world_size: int, step: int, seed: int) -> tuple[list[int], list[int]]:
    both = sorted({(rank - 1) % world_size, (rank + 1) % world_size})
    return both, both


def _exponential(rank: int, world_size: int, step: int, seed: int) -> tuple[list[int], list[int]]:
    distance = 2 ** (step % (world_size - 1).bit_length())
    return [(rank + distance) % world_size], [(rank - distance) % world_size]


def _in_pairs(rank: int, world_size: int, step: int, seed: int) -> tuple[list[int], list[int]]:
    order = list(range(world_size))
    random.Random(f"{seed} {step}").shuffle(order)  # the same on every rank
    partner = order[place : place + 1] if (place := order.index(rank) ^ 1) < world_size else []
    return partner, partner


# the ranks to which `rank` sends in a step, and those from which it receives
_NEIGHBOURS: dict[str, Callable[[int, int, int, int], tuple[list[int], list[int]]]] = {
    "ring": _on_ring,
    "exponential": _exponential,
    "pairs": _in_pairs,
}
