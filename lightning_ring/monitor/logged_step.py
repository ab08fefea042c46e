"""A logged step, from the numbers that this rank sends to the report of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ring.monitor.rank_rows import RowExchange
from lightning_ring.monitor.ring_report import RingReport

UNKNOWN = -math.inf  # in the place of a squared norm; in a sum with what other ranks have it stays negative
_DID_NOT_STEP = -1.0  # the same


@dataclass(slots=True)
class LoggedStep:
    """A logged step, until all ranks' rows are here."""

    step: int
    num_optimizers: int
    learning_rates: dict[str, float]
    trust_ratios: Tensor
    rows: RowExchange

    def report(self) -> RingReport:
        rows, sums = self.rows.finish()
        uncounted, squares, buckets = sums[0], sums[1 : 1 + self.num_optimizers], sums[1 + self.num_optimizers :]
        ratios = self.trust_ratios
        return RingReport(
            step=self.step,
            rows=rows,
            gradient_norms=[None if square < 0 else math.sqrt(square) for square in squares.tolist()],
            bucket_norms=buckets.sqrt().tolist() if not (buckets < 0).any() else [],
            skipped=rows[0].skipped + float(uncounted) / len(rows),  # all ranks skip the same steps
            learning_rates=self.learning_rates,
            trust_ratios=ratios[~ratios.isnan()],
        )


def numbers_on_device(
    uncounted: Tensor, squares: Sequence[Tensor | None], num_buckets: int, device: torch.device
) -> Tensor:
    """1-D, float64: skipped steps, the sum of each optimizer's ``squares``, the sum over optimizers of each bucket's.

    Of those that are not known of all, as where buckets were laid out anew between two optimizers' steps, none are.
    """
    missing = torch.full((1,), _DID_NOT_STEP, dtype=torch.float64)
    sums = [missing if one is None else one.sum().reshape(1) for one in squares]
    by_bucket = [one for one in squares if one is not None]
    if by_bucket and all(one.numel() == num_buckets for one in by_bucket):
        buckets = torch.stack(by_bucket).sum(0)
    else:
        buckets = torch.full((num_buckets,), UNKNOWN, dtype=torch.float64)
    return torch.cat([part.to(device, non_blocking=True) for part in (uncounted.reshape(1), *sums, buckets)])
