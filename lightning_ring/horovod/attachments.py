"""What is attached to the ranks of a generation, and to those of the next one:
`DistributedOptimizer`s.
"""

from __future__ import annotations

from typing import Protocol
from weakref import WeakKeyDictionary

from torch.optim import Optimizer


class Attachment(Protocol):
    def attach(self) -> None:
        """Reduce gradients over the ranks that there are now."""

    def detach(self) -> None:
        """Take that back. The ranks may be gone."""


# in the order in which they were made
attachments: WeakKeyDictionary[Optimizer, Attachment] = WeakKeyDictionary()


def detach_all() -> None:
    for attachment in list(attachments.values()):
        attachment.detach()


def attach_all() -> None:
    for attachment in list(attachments.values()):
        attachment.attach()
