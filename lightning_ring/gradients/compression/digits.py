"""Small numbers, several to a byte."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ring.gradients.compression.registry import digits_a_byte


def num_bytes(numel: int, base: int) -> int:
    """Length of the message of ``numel`` digits of ``base``: two bytes each from 257 on."""
    return 2 * numel if base > 256 else -(-numel // int(digits_a_byte(base)))


def pack(digits: Tensor, base: int, message: Tensor) -> None:
    """Write the 1-D ``digits`` (uint8, from 257 on int16; each below ``base``) to ``message``,
    which may be longer.

    Byte i holds digits i, i + m, i + 2m, ... of the m bytes, the last one in the highest place.
    """
    if base > 256:
        message.view(torch.int16)[: digits.numel()].copy_(digits)
        return
    per_byte, length = int(digits_a_byte(base)), num_bytes(digits.numel(), base)
    out = message[:length].zero_()
    for place in reversed(range(per_byte)):
        row = digits[place * length : (place + 1) * length]
        out.mul_(base)
        out[: row.numel()].add_(row)


def unpack(message: Tensor, base: int, digits: Tensor) -> None:
    """Replace ``digits`` by those that were packed."""
    if base > 256:
        digits.copy_(message.view(torch.int16)[: digits.numel()])
        return
    per_byte, length = int(digits_a_byte(base)), num_bytes(digits.numel(), base)
    value = torch.arange(256, device=message.device)
    for place in range(per_byte):
        row = digits[place * length : (place + 1) * length]
        # a table: vectors have no division of integers
        digit_of = (value // base**place % base).to(torch.uint8)
        torch.index_select(digit_of, 0, message[: row.numel()].int(), out=row)
