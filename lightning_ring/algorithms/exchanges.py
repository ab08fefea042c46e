"""What ranks send under algorithms that send more than gradients, for predictions. It imports no
torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from lightning_ring.gradients.compression.registry import e3m0_bytes, four_bytes, int8_bytes

OUTER_BYTES = {32: four_bytes, 8: int8_bytes, 4: e3m0_bytes}  # by bits of a value
OUTER_COMPRESSORS = {32: None, 8: "int8", 4: "4 bits"}


@dataclass(frozen=True, slots=True)
class AllReduce:
    """An all-reduce over all ranks.

    Attributes:
        num_bytes: From a model's number of float32 parameters and the number of ranks: of the
            float32 all-reduce that takes as long, of which a rank sends 2·(N-1)/N.
        compressor: Name of that of the values, if any.
    """

    num_bytes: Callable[[int, int], float]
    compressor: str | None = None


@dataclass(frozen=True, slots=True)
class Direct:
    """Messages from rank to rank.

    The functions of bytes take a model's number of float32 parameters, the number of ranks, and how
    many share a host.

    Attributes:
        num_messages: Each of which waits for the one before.
        passing_bytes: What they bring through a link in all, one after another, where each takes
            longest.
        sent_bytes: What the host that sends most sends in all of them.
    """

    num_messages: int
    passing_bytes: Callable[[int, int, int], float]
    sent_bytes: Callable[[int, int, int], float]


@dataclass(frozen=True, slots=True)
class Exchange:
    """What ranks exchange that step alone: the same again and again.

    Attributes:
        traffic: Of all parameters, once.
        every: Steps from one exchange to the next of the same parameters.
        parts: Messages at different steps that the parameters are cut into.
        rounds: Collectives that ranks wait for in ``every`` steps, one after another.
        hidden_steps: Whole steps of computation while which a message travels, before anybody waits
            for it.
        hidden_phases: Phases of one step (as `tools.plan.profile.Phases` names them) while which it
            travels, besides.
        in_nodes: Whether the ranks of a node average their gradients at every step besides.
        optimizer_steps: What the busiest server steps, from the number of ranks, while each rank
            takes a step: in steps of an optimizer of all parameters. `None`: ranks step for
            themselves.
        copies: Exchanges of as many values, one after another: of the parameters, and of the
            optimizer's state.
        asking: Of the ranks, from their number, the part that waits for exchanges, where each rank
            goes at its own pace and others answer. An exchange then begins behind the first step
            after the end of the last one, and what it hides behind is all of the steps after it.
            `None`: all ranks wait for each other.
        passes: From the number of ranks, additions and copies over all parameters in each step of
            the busiest rank.
    """

    traffic: AllReduce | Direct
    every: int = 1
    parts: int = 1
    rounds: int = 1
    hidden_steps: float = 0
    hidden_phases: tuple[str, ...] = ()
    in_nodes: bool = False
    optimizer_steps: Callable[[int], float] | None = None
    copies: int = 1
    asking: Callable[[int], float] | None = None
    passes: Callable[[int], float] | None = None


def local_sgd(every: int, in_nodes: bool = False, num_states: int = 0) -> Exchange:
    """All-reduces in float32, of parameters and of so many values for each in the optimizer's
    state, after one of requests to stop."""
    copies = 1 + num_states
    return Exchange(
        AllReduce(four_bytes), every, rounds=1 + copies, in_nodes=in_nodes, copies=copies
    )


def diloco(
    every: int, fragments: int = 1, overlap: int = 0, outer_bits: int = 32, in_nodes: bool = False
) -> Exchange:
    """An all-reduce of outer gradients, compressed ones in two legs, and at a round's end one of
    requests to stop.
    """
    traffic = AllReduce(OUTER_BYTES[outer_bits], OUTER_COMPRESSORS[outer_bits])
    rounds = 1 + fragments * (1 if traffic.compressor is None else 2)
    return Exchange(traffic, every, fragments, rounds, overlap, in_nodes=in_nodes)


def gossip(topology: str) -> Exchange:
    """Parameters to one rank, or on a ring to both neighbours, while a batch is computed.
    Lengths travel before.
    """
    num_bytes = partial(_to_neighbours, 2 if topology == "ring" else 1)
    passes = partial(_gossip_passes, 2 if topology == "ring" else 1)
    return Exchange(
        Direct(2, num_bytes, num_bytes),
        rounds=2,
        hidden_phases=("forward", "backward"),
        passes=passes,
    )


def num_gossip_parts(num_bytes: float) -> int:
    """In how many messages a rank sends its parameters: the answers to the first ones come while
    the last ones go.
    """
    return int(min(16, max(1, num_bytes // 2**18)))


def asynchronous_gossip(overlap: int | None = 0) -> Exchange:
    """Parameters of each even rank to an odd one, and that one's back, while batches are
    computed and stepped with.
    """
    traffic, hidden_steps = (
        Direct(2, _past_odd_ranks, _of_odd_ranks),
        math.inf if overlap is None else overlap,
    )
    return Exchange(
        traffic,
        rounds=2,
        hidden_steps=hidden_steps,
        asking=_part_of_even_ranks,
        passes=_step_passes,
    )


def parameter_server(servers: int | None = None, mode: str = "bulk") -> Exchange:
    """Gradients to the servers, which ``servers`` ranks are (`None`: all), and weights back."""
    traffic = Direct(2, partial(_past_servers, servers), partial(_of_servers, servers))
    steps = partial(_server_steps, servers, mode == "bulk")
    passes = partial(_server_passes, servers, mode == "bulk")
    return Exchange(traffic, rounds=2, optimizer_steps=steps, passes=passes)


def _to_neighbours(count: int, numel: int, world_size: int, local_size: int) -> float:
    return 4 * numel * min(count, world_size - 1) * local_size


def _gossip_passes(count: int, world_size: int) -> float:
    """One vector of all parameters, side by side with the neighbours', their mean, and the
    parameters from that.
    """
    neighbours = min(count, world_size - 1)
    return 1 + (1 + neighbours) + neighbours + 1


def _step_passes(world_size: int) -> float:
    """A step is subtracted, added and copied, and the parameters are written."""
    return 4


def _past_odd_ranks(numel: int, world_size: int, local_size: int) -> float:
    """To the odd ranks of a host, or of its even ones to others.

    A lone rank's wire is free the other way: answers come back a part later. That of several
    carries others' answers.
    """
    both = 1 + 1 / num_gossip_parts(4 * numel) if local_size == 1 else 2
    return both * 4 * numel * _askers_of_each(world_size) * -(-local_size // 2)


def _of_odd_ranks(numel: int, world_size: int, local_size: int) -> float:
    """Of which a host of one rank asks or answers, and one of several does both."""
    return 4 * numel * _askers_of_each(world_size) * local_size


def _part_of_even_ranks(world_size: int) -> float:
    return -(-world_size // 2) / world_size


def _askers_of_each(world_size: int) -> float:
    return -(-world_size // 2) / max(1, world_size // 2)


def _past_servers(servers: int | None, numel: int, world_size: int, local_size: int) -> float:
    """Gradients into a host of servers, or out of one of workers; weights take the same way
    back.
    """
    number, on_host = _servers(servers, world_size, local_size)
    return (
        2
        * 4
        * numel
        / number
        * max((world_size - local_size) * on_host, local_size * (number - on_host))
    )


def _of_servers(servers: int | None, numel: int, world_size: int, local_size: int) -> float:
    number, on_host = _servers(servers, world_size, local_size)
    return (
        4 * numel / number * ((world_size - local_size) * on_host + local_size * (number - on_host))
    )


def _servers(servers: int | None, world_size: int, local_size: int) -> tuple[int, int]:
    """How many there are, and the most on a host."""
    number = min(servers or world_size, world_size)
    return number, -(-number * local_size // world_size)


def _server_steps(servers: int | None, bulk: bool, world_size: int) -> float:
    """One of the mean of all gradients, or one of each rank's, of a server's part of the
    parameters.
    """
    return (1 if bulk else world_size) / min(servers or world_size, world_size)


def _server_passes(servers: int | None, bulk: bool, world_size: int) -> float:
    """A worker copies gradients, and weights; a server the weights for each worker, and in bulk
    averages gradients.
    """
    average = world_size + 1 if bulk else 0
    return 2 + (world_size + average) / min(servers or world_size, world_size)


# what `lightning-ring plan` compares, by how it is written in Python; what changes a training least
# comes first
EXCHANGES: Mapping[str, Exchange] = {
    "ParameterServer()": parameter_server(),
    "LocalSGD(8)": local_sgd(8),
    "LocalSGD(32)": local_sgd(32),
    "DiLoCo(100)": diloco(100),
    "DiLoCo(100, fragments=4, overlap=10, outer_bits=4)": diloco(100, 4, 10, 4),
    "Gossip('exponential')": gossip("exponential"),
    "AsynchronousGossip()": asynchronous_gossip(),
    "ParameterServer(mode='async')": parameter_server(mode="async"),
}
