"""Gradients as -1, 0 or 1 times a scaler, drawn at random so that their mean is right.

Source: Wen et al., "TernGrad: ternary gradients to reduce communication in distributed deep
    learning" (2017),
arXiv:1705.07878: algorithm 1, with layer-wise ternarizing, gradient clipping (section 5) and scaler
sharing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_ring.comm.communicator import Communicator, ReduceOp, Work
from lightning_ring.errors import ConfigurationError, check_arguments
from lightning_ring.gradients.compression.between_nodes import (
    MIN_NUMEL,
    BetweenNodes,
    Part,
    messages,
)
from lightning_ring.gradients.compression.compressor import GradientLayout, bounds_of
from lightning_ring.host.random_state import own_memory

_SMALLEST = 1e-15  # a layer whose largest gradient is smaller is not clipped


class TernGrad(BetweenNodes):
    """``compression="terngrad"``: five gradients in a byte on the way to the sum, on the way back
    two or three.

    A gradient g travels as s · sign(g) · b, where b is 1 with probability |g|/s, else 0: its mean
    is g. The scaler s is the largest |g| of a layer on any rank, after g was clipped at ``clip``
    times σ, its standard deviation. Each rank adds up its shard and sends the sums, exact whole
    numbers of s. A layer is the gradient of a parameter, or the part of it in this bucket that this
    rank sends between nodes. σ is taken about 0, so that a layer of equal gradients is not clipped.
    A clipped value is biased. A layer below 1e-15 is not clipped.

    It takes up to 127 ranks, or nodes.

    Args:
        clip: In units of σ; ``math.inf`` clips nothing.
        seed: Of the random numbers, of which every rank draws others.
        min_numel: As of `BetweenNodes`.

    Raises:
        ConfigurationError: An argument cannot work.
    """

    name = "terngrad"

    def __init__(self, clip: float = 2.5, seed: int = 0, min_numel: int = MIN_NUMEL) -> None:
        super().__init__(min_numel)
        check_arguments("TernGrad", clip > 0, "a number of σ above 0, such as 2.5", clip=clip)
        self.clip = clip
        self.seed = seed
        # start and end of each gradient in a flat tensor
        self._layers: dict[Tensor, list[tuple[int, int]]] = {}
        self._generator: torch.Generator | None = None
        self._loaded: Tensor | None = None

    def prepare(self, flat: Tensor, layout: GradientLayout) -> None:
        self._layers[flat] = bounds_of(flat, layout)

    def forget_tensors(self) -> None:
        self._layers.clear()

    def all_reduce(
        self, flat: Tensor, comm: Communicator, *, lost: Tensor | None = None, name: str = ""
    ) -> Work:
        if self._generator is None:
            self._generator = torch.Generator(flat.device).manual_seed(
                1_000_003 * self.seed + comm.rank
            )
            if self._loaded is not None:
                self._generator.set_state(self._loaded)
        return super().all_reduce(flat, comm, lost=lost, name=name)

    def average(self, part: Part) -> Iterator[Work]:
        values, group = part.values, part.group
        size, mine = group.world_size, group.shard_index
        base = 2 * size + 1  # a sum of `size` digits from 0 to 2
        if base > 256:
            raise ConfigurationError(
                f"compression 'terngrad' got {size} ranks or nodes, and sums of more than 127 do "
                "not fit into a byte. Use 'int8' or 'onebit'."
            )
        layers = part.cut(self._layers[part.whole])
        if not layers:  # padding between gradients
            if part.lost is not None:
                part.lost.zero_()
            return
        scalers = self._scalers(values, layers)
        yield group.all_reduce_(scalers, op=ReduceOp.MAX, name=f"{part.name}, scalers")
        ternary = self._ternary(values, layers, scalers)
        if part.lost is not None:
            part.lost.copy_(ternary).sub_(1)
            _scale(part.lost, layers, scalers)
            torch.sub(values, part.lost, out=part.lost)
        digits = ternary.tensor_split(size)
        longest = digits[0].numel()
        sent = messages(size, num_bytes(longest, 3), values)
        for own, message in zip(digits, sent, strict=True):
            pack(own, 3, message)
        received = torch.empty_like(sent)
        targets = [sent[index] for index in group.shard_indices]
        yield group.all_to_all(targets, list(received), name=part.name)
        total = torch.zeros_like(digits[mine])
        for message in received:
            unpack(message, 3, digits[mine])
            total += digits[mine]
        sums = messages(size, num_bytes(longest, base), values)
        pack(total, base, sums[mine])
        yield group.all_gather_(sums.view(-1), name=f"{part.name}, sums")
        for message, own in zip(sums, digits, strict=True):
            unpack(message, base, own)
        values.copy_(ternary).sub_(size).div_(size)
        _scale(values, layers, scalers)

    def state_dict(self, comm: Communicator) -> dict[str, Any]:
        """The random states of all ranks; empty before the first gradient, unless some were
        loaded.
        """
        state = self._loaded if self._generator is None else self._generator.get_state()
        if state is None:
            return {}
        return {"generators": comm.all_gather(state, name="random states of TernGrad")}

    def load_state_dict(self, state: dict[str, Any], rank: int, world_size: int) -> str | None:
        generators = state.get("generators", ())
        if len(generators) == world_size:  # elsewhere other numbers are as good
            self._loaded, self._generator = own_memory(generators[rank]), None
        return None

    def _scalers(self, values: Tensor, layers: list[tuple[int, int]]) -> Tensor:
        """s of each layer on this rank; inf where a gradient is not finite."""
        pieces = [values[start:end] for start, end in layers]
        most = torch.stack(torch._foreach_norm(pieces, math.inf))
        roots = [math.sqrt(end - start) for start, end in layers]
        sigma = torch.stack(list(torch._foreach_div(torch._foreach_norm(pieces, 2), roots)))
        # smaller gradients have squares below float32's range, and σ would be 0
        clipped = torch.minimum(most, self.clip * sigma)
        most = torch.where(most > _SMALLEST, clipped, most)
        return torch.where(most.isfinite(), most, torch.inf)

    def _ternary(self, values: Tensor, layers: list[tuple[int, int]], scalers: Tensor) -> Tensor:
        """0, 1 or 2 for -1, 0 or 1, as uint8: floor(u + g/s) of a uniform u is 1 more often by
        g/s.
        """
        numbers = torch.rand(values.numel(), generator=self._generator, device=values.device)
        # else inf, and 0 · inf
        steps = torch.where(scalers >= torch.finfo(scalers.dtype).tiny, 1 / scalers, 0.0)
        pieces = [numbers[start:end] for start, end in layers]
        shares = torch._foreach_mul([values[start:end] for start, end in layers], list(steps))
        torch._foreach_add_(pieces, shares)
        return numbers.add_(1).floor_().clamp_(0, 2).to(torch.uint8)


def _scale(values: Tensor, layers: list[tuple[int, int]], scalers: Tensor) -> None:
    torch._foreach_mul_([values[start:end] for start, end in layers], list(scalers))


def digits_a_byte(base: int) -> int:
    """How many digits of ``base``, which is 256 at most, fit into a byte."""
    return int(math.log(256, base))


def num_bytes(numel: int, base: int) -> int:
    """Length of the message of ``numel`` digits of ``base``, which is 256 at most."""
    return -(-numel // digits_a_byte(base))


def pack(digits: Tensor, base: int, message: Tensor) -> None:
    """Write the 1-D uint8 ``digits``, each below ``base``, to ``message``, which may be longer.

    Byte i holds digits i, i + m, i + 2m, ... of the m bytes, the last one in the highest place.
    """
    length = num_bytes(digits.numel(), base)
    out = message[:length].zero_()
    for place in reversed(range(digits_a_byte(base))):
        row = digits[place * length : (place + 1) * length]
        out.mul_(base)
        out[: row.numel()].add_(row)


def unpack(message: Tensor, base: int, digits: Tensor) -> None:
    """Replace ``digits`` by those that were packed."""
    length = num_bytes(digits.numel(), base)
    value = torch.arange(256, device=message.device)
    for place in range(digits_a_byte(base)):
        row = digits[place * length : (place + 1) * length]
        # a table: vectors have no division of integers
        digit_of = (value // base**place % base).to(torch.uint8)
        torch.index_select(digit_of, 0, message[: row.numel()].int(), out=row)
