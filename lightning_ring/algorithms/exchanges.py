"""What ranks send under algorithms that send parameters, for predictions. It imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from lightning_ring.gradients.compression.registry import e3m0_bytes, four_bytes, int8_bytes

OUTER_BYTES = {32: four_bytes, 8: int8_bytes, 4: e3m0_bytes}  # by bits of a value


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages between ranks that step alone: the same again and again.

    Attributes:
        num_bytes: From a model's number of parameters and the number of ranks, all that is sent in ``every`` steps: in
            bytes of the float32 all-reduce that costs as much, of which a rank sends 2·(N-1)/N.
        every: Steps from one exchange to the next of the same parameters.
        parts: Messages at different steps that the parameters are cut into.
        hidden_steps: Steps of computation while which a message travels, before anybody waits for it.
        in_nodes: Whether the ranks of a node average their gradients at every step besides.
    """

    num_bytes: Callable[[int, int], float]
    every: int = 1
    parts: int = 1
    hidden_steps: float = 0.0
    in_nodes: bool = False


def local_sgd(every: int, in_nodes: bool = False) -> Exchange:
    """An all-reduce of parameters in float32."""
    return Exchange(four_bytes, every, in_nodes=in_nodes)


def diloco(every: int, fragments: int = 1, overlap: int = 0, outer_bits: int = 32, in_nodes: bool = False) -> Exchange:
    """An all-reduce of outer gradients."""
    return Exchange(OUTER_BYTES[outer_bits], every, fragments, overlap, in_nodes=in_nodes)


def gossip(topology: str) -> Exchange:
    """Parameters to one rank, or on a ring to both neighbours, while a batch is computed."""
    return Exchange(partial(_to_neighbours, 2 if topology == "ring" else 1), hidden_steps=1)


def _to_neighbours(count: int, numel: int, world_size: int) -> float:
    return 4 * numel * min(count, world_size - 1) * world_size / (2 * max(1, world_size - 1))


# what `lightning-ring plan` compares, by how it is written in Python
EXCHANGES: Mapping[str, Exchange] = {
    "LocalSGD(8)": local_sgd(8),
    "LocalSGD(32)": local_sgd(32),
    "DiLoCo(100)": diloco(100),
    "DiLoCo(100, fragments=4, overlap=10, outer_bits=4)": diloco(100, 4, 10, 4),
    "Gossip('exponential')": gossip("exponential"),
}
