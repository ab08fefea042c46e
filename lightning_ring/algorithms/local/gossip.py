"""Decentralised training: pairs of ranks average their parameters while all of them compute.

Source: Lian, Zhang, Zhang and Liu, "Asynchronous decentralized parallel stochastic gradient
descent" (2018), arXiv:1710.06952 (AD-PSGD), algorithm 1, with the bipartite graph of section 3.3
against deadlocks.
"""

from __future__ import annotations

import itertools
import math
import random
import threading
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_ring.algorithms.hooks import steps_module
from lightning_ring.algorithms.local.local_sgd import LocalSGD
from lightning_ring.algorithms.own_pace import (
    check_same_parameters,
    meet_for_pause,
    meet_to_stop,
    parts_of,
)
from lightning_ring.comm.communicator import ReduceOp
from lightning_ring.comm.recording import unrecorded
from lightning_ring.comm.requests import Answers, Requests
from lightning_ring.errors import ConfigurationError

_STOP = torch.ones(1, dtype=torch.uint8)  # a question that is no exchange


def num_gossip_parts(num_bytes: int) -> int:
    """In how many messages a rank sends its parameters: the answers to the first ones come while
    the last ones go.
    """
    return min(16, max(1, num_bytes // 2**18))


class AsynchronousGossip(LocalSGD):
    """Rank r has parameters x_r, and computes its gradient g_r for a copy of them. Even ranks
    choose an odd one, s::

        x_r, x_s ← (x_r + x_s) / 2      while both compute
        x_r ← x_r + (the optimizer's step from the copy with g_r)      at the end of each batch

    A thread of rank s answers, however far that rank is with its batch, so that a slow rank holds
    nobody up. Rank r begins an average behind a step, and goes on with its batches while it is on
    its way, for ``overlap`` steps at most. What x_r has gained meanwhile is added to the average.
    The mean of all x moves as if every step were divided by the number of ranks. Fast ranks take
    more steps than slow ones, if they have data for them. Evaluations and checkpoints wait for all
    ranks, and see their average.

    Args:
        overlap: Steps that an even rank takes while an average is on its way. 0: the average
            travels while the next batch is computed, and that batch's step waits for it. `None`: no
            step waits. Averages then are as old as a slow wire makes them, which costs accuracy.
        seed: Of the choice of partners.

    `metrics` has the ``consensus_distance``: the root mean square over the ranks of |x_r - mean of
    all x|, when `show_averages` ran last.

    Raises:
        ConfigurationError: ``overlap`` is neither `None` nor a number of steps.
    """

    _exchange = (
        "while it computes parameters are averaged with those of another rank, which waits for "
        "nothing,"
    )

    def __init__(self, *, overlap: int | None = 0, seed: int = 0) -> None:
        super().__init__(1)
        if overlap is not None and (type(overlap) is not int or overlap < 0):
            raise ConfigurationError(
                f"AsynchronousGossip got overlap={overlap!r}, expected a number of steps, or None: "
                "no step waits."
            )
        self.overlap = overlap
        self.seed = seed
        self.steps_together = False
        self._metrics: dict[str, float] = {}
        self._requests: Requests | None = None
        self._exchange_under_way: Answers | None = None
        self._steps_meanwhile = 0  # since that exchange began
        self._told_to_stop = False
        self._has_begun = False  # a batch

    # -- begin and end

    def detach(self, *, wait: bool = True) -> None:
        self._end_requests(wait=wait)
        self._has_begun = False
        super().detach(wait=wait)

    def load_state_dict(self, state: dict[str, Any]) -> str:
        self._end_requests()  # no average with what was there before may arrive later
        return super().load_state_dict(state)

    def _answer_others(self) -> None:
        """Collective: at the first batch, or before an evaluation or the end on ranks that have no
        batch by then.
        """
        params = self._parameters()
        if self._requests is not None:
            check_same_parameters(params, self._listed, "AsynchronousGossip")
            return
        self._changing = threading.RLock()  # the memory of x
        self._listed: list[Parameter] = params  # all that are trained
        self._parts = parts_of(params, num_gossip_parts(sum(param.nbytes for param in params)))
        # in the order of the parts
        self._params = [params[index] for part in self._parts for index in part.indices]
        self._turns = {  # the part of the next question of each peer
            peer: itertools.cycle(range(len(self._parts))) for peer in range(self._comm.world_size)
        }
        # x_r, in messages
        self._x = [torch.zeros(part.nbytes, dtype=torch.uint8) for part in self._parts]
        pairs = zip(self._parts, self._x, strict=True)
        self._views = [view for part, x in pairs for view in part.views(x, params)]
        with torch.no_grad():
            torch._foreach_copy_(self._views, self._on_host())
        self._copied = [view.clone() for view in self._views]  # for which g_r is computed
        # x_r as it was sent, on even ranks
        self._asked = [torch.empty_like(x) for x in self._x if self._comm.rank % 2 == 0]
        self._requests = unrecorded(self._comm).open_requests(self._answer)
        self._requests.start()

    def _end_requests(self, *, wait: bool = True) -> None:
        if self._requests is None:
            return
        if wait:
            self._finish_exchange()
        self._exchange_under_way = None
        requests, self._requests = self._requests, None
        requests.close(wait=wait)

    # -- a step

    @property
    def steps_of_round(self) -> int:
        """1 from the first step on: the ranks' parameters are never the same again."""
        return int(self.num_steps > 0)

    def begin_batch(self, active_ranks: int | None = None) -> None:
        super().begin_batch(active_ranks)
        if self._comm.world_size == 1:
            return
        self._has_begun = True
        self._answer_others()

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        self._hide_averages()

    def after_step(self, optimizer: Optimizer) -> None:
        if not steps_module(optimizer, self._module):
            return
        self.num_steps += 1
        self._note_stepped()
        if self._requests is None:
            return
        if self.overlap is not None and self._steps_meanwhile >= self.overlap:
            self._finish_exchange()
        self._add_step()
        self._steps_meanwhile += 1
        if self._asked:
            self._begin_exchange()

    def show_averages(self) -> None:
        if self._comm.world_size == 1:
            return
        self._answer_others()  # this rank may have had no batch, and the others ask it
        self._finish_exchange()
        if not meet_for_pause(self._comm, after_steps=self._has_begun and not self._own):
            return
        self._hide_averages()  # where this rank alone has taken no step
        self._add_step()  # of length 0: the parameters become x
        self._show(self._listed, "parameters")
        self._note_consensus_distance()

    def _note_consensus_distance(self) -> None:
        squares = [
            (own - param.detach()).square().sum(dtype=torch.float64)
            for param, own in self._own.items()
        ]
        mean = torch.stack(squares).sum().view(1).cpu()
        comm = unrecorded(self._comm)
        comm.all_reduce_(mean, op=ReduceOp.AVG, name="consensus distance").wait()
        self._metrics["consensus_distance"] = math.sqrt(mean.item())

    def metrics(self) -> dict[str, float]:
        return self._metrics

    def _begin_exchange(self) -> None:
        """Unless the last one is still under way."""
        comm, under_way = self._comm, self._exchange_under_way
        assert self._requests is not None
        if under_way is not None and not under_way.done():
            self._requests.check()  # nobody waits, and would be told of a failed rank
            return
        self._finish_exchange()
        chosen = random.Random(f"{self.seed} {comm.rank} {self.num_steps}").randrange(
            1, comm.world_size, 2
        )
        torch._foreach_copy_(self._asked, self._x)  # which nobody else changes now
        name = f"step {self.num_steps + 1}: average with rank {chosen}"
        self._exchange_under_way = self._requests.ask(
            {chosen: self._asked},
            name,
            lambda peer, index, theirs: self._average_part(index, theirs, self._asked[index]),
        )
        self._steps_meanwhile = 0

    def _finish_exchange(self) -> None:
        """On an even rank: x_r has become the mean, and what it has gained since it was sent."""
        under_way, self._exchange_under_way = self._exchange_under_way, None
        if under_way is not None:
            under_way.wait()

    @torch.no_grad()
    def _add_step(self) -> None:
        """x ← x + (parameters - copy), exactly the parameters where x has not moved; then both
        become x.
        """
        with self._changing:
            x = self._views
            torch._foreach_sub_(x, self._copied)
            torch._foreach_add_(x, self._on_host())
            torch._foreach_copy_(self._copied, x)
            torch._foreach_copy_([*self._params], x)

    def _on_host(self) -> list[Tensor]:
        return [param.detach().to("cpu") for param in self._params]

    # -- in threads

    def _answer(self, peer: int, question: Tensor) -> Tensor:
        if question.numel() == 1:
            self._told_to_stop = True
            return _STOP
        index = next(self._turns[peer])
        with self._changing:
            before = self._x[index].clone()
            self._average_part(index, question, before)
        return before

    @torch.no_grad()
    def _average_part(self, index: int, theirs: Tensor, ours: Tensor) -> None:
        """Move a part of x by half of the way from ``ours`` to ``theirs``, in whose place the
        way is written.
        """
        part = self._parts[index]
        way = part.views(theirs, self._listed)
        torch._foreach_sub_(way, part.views(ours, self._listed))
        with self._changing:
            torch._foreach_add_(part.views(self._x[index], self._listed), way, alpha=0.5)

    # -- requests to stop

    def agreed_to_stop(self) -> bool:
        if self._requests is None:
            return False
        comm = self._comm
        if self._asked_to_stop and not self._told_to_stop:
            ranks = range(comm.world_size)  # this one too
            self._requests.ask(dict.fromkeys(ranks, (_STOP,)), "a request to stop").wait()
        agreed = self._told_to_stop and meet_to_stop(comm)
        self._told_to_stop &= not agreed
        return agreed
