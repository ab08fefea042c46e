"""Gradients that travel as float16: 11 bits of precision, from 6e-8 to 65,504."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from lightning_ring.gradients.compression.sixteen_bit import SixteenBit

log = logging.getLogger(__name__)


class FP16(SixteenBit):
    """``compression="fp16"``: relative error of a rounding 2⁻¹² at most, for values that float16 can hold.

    A larger one becomes inf on every rank, as a gradient in float16 would: a loss scaler sees it, skips the step on all
    ranks and scales less. One smaller than 6e-8 becomes 0. What overflowed is reported once.
    """

    def __init__(self) -> None:
        super().__init__("fp16", torch.float16)
        self._sums: list[tuple[str, Tensor]] = []
        self._reported = False

    def begin_backward(self) -> None:
        self._report_overflow()  # on CUDA, of the last backward: reading it at once would stop the host

    def inspect(self, average: Tensor, name: str) -> None:
        if self._reported:
            return
        if average.is_cuda:
            self._sums.append((name, average.sum(dtype=torch.float32)))  # not finite if any element is not
        elif not average.sum().isfinite() and not average.isfinite().all():  # a sum in float16 may itself overflow
            self._report(name)

    def _report_overflow(self) -> None:
        sums, self._sums = self._sums, []
        for name, total in sums:
            if not self._reported and not total.isfinite():
                self._report(name)

    def _report(self, name: str) -> None:
        self._reported = True
        log.warning(
            "lightning_ring: the averaged gradient in %s holds inf or nan after it travelled as float16, whose "
            "largest value is 65504. A loss scaler skips such a step; without one the parameters are lost: use "
            'compression="bf16", which has the range of float32.',
            name,
        )
