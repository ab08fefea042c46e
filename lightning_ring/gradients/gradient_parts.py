"""Gradients that one backward produces in several parts: a shared module under reentrant
checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import Parameter

from lightning_ring.comm.communicator import Communicator
from lightning_ring.gradients.bucket import Bucket
from lightning_ring.gradients.sending import average_

_TO_DO = "Use `checkpoint(..., use_reentrant=False)` to get the overlap back."


class GradientParts:
    """Ends the overlap on all ranks if a gradient comes in parts, and averages parts whose bucket
    was already sent.

    ``warn`` is called with a message for the user. Unless ``overlaps``, all buckets are sent at the
    end of backward.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.overlaps = True
        self._warn = warn
        self._found = False
        self._late: set[Parameter] = set()  # a part came after the bucket was sent

    def begin_backward(self) -> None:
        self._late.clear()

    def add(self, param: Parameter, *, sent: bool) -> None:
        """Backward produced a further part of the gradient of ``param``. ``sent``: its bucket
        was sent before.
        """
        self._found = True
        if sent:
            self._late.add(param)

    def agree(self, comm: Communicator) -> None:
        """After the first backward: end the overlap if some rank has gradients in several parts.
        Collective.
        """
        if any(comm.all_gather_object(self._found, name="gradients in parts")):
            self.overlaps = False
            self._warn(
                "backward produces a gradient in several parts (reentrant checkpointing of a "
                "module that is used more than once). Gradients are therefore sent after "
                f"backward, without overlap. {_TO_DO}"
            )

    def average_late(
        self, buckets: Sequence[Bucket], comm: Communicator, active_ranks: int | None, prefix: str
    ) -> None:
        """Average the parts in ``param.grad`` whose bucket was sent before, and add them to the
        bucket.

        Collective if there are any. ``prefix`` begins the names of the collectives.
        """
        late, self._late = self._late, set()
        if not late:
            return
        self.overlaps = False
        self._warn(
            "backward produced a gradient again after it had been sent (reentrant checkpointing "
            "of a module that is used more than once). It was sent a second time; from now on "
            f"gradients are sent after backward, without overlap. {_TO_DO}"
        )
        grads = {param: param.grad for param in late if param.grad is not None}
        for bucket in buckets:
            if not any(param in grads for param in bucket.params):
                continue
            flat = torch.zeros_like(bucket.flat)
            offset = bucket.flat.storage_offset()
            for param, view in zip(bucket.params, bucket.views, strict=True):
                if param in grads:
                    flat.as_strided(
                        view.size(), view.stride(), view.storage_offset() - offset
                    ).copy_(grads[param])
            average_(flat, comm, active_ranks, f"{prefix}late part of {bucket.describe()}").wait()
            bucket.flat.add_(flat)
