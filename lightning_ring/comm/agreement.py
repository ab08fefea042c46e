"""Ranks compare the collectives that they call, so that a difference is an error and not a hang."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ring.comm.waiting import ranks_text
from lightning_ring.errors import CollectiveError

HEADER_BYTES = 128
_DIGEST_BYTES = 8


def describe(kind: str, *details: object, name: str = "") -> str:
    """``all_reduce "bucket 3" (sum, float32, 1024 elements)``: the same text on all ranks if they agree."""
    shown = ", ".join(str(detail).removeprefix("torch.") for detail in details)
    return kind + (f' "{name}"' if name else "") + (f" ({shown})" if shown else "")


def header(description: str) -> Tensor:
    """``description`` as `HEADER_BYTES` of uint8: a digest of all of it, then as much of it as fits, for the error."""
    text = description.encode()
    digest = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
    return torch.frombuffer(bytearray((digest + text)[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)


def check_agreement(headers: Tensor, call: int) -> None:
    """Compare all ranks' ``headers`` (world size × `HEADER_BYTES`) of their ``call``-th collective.

    Raises:
        CollectiveError: They differ; the message is the same on every rank.
    """
    if torch.equal(headers, headers[:1].expand_as(headers)):
        return
    texts = [bytes(row[_DIGEST_BYTES:].tolist()).rstrip(b"\0").decode(errors="ignore") for row in headers.cpu()]
    raise CollectiveError(
        f"the ranks called different collectives (call {call} of this communicator): {by_rank(texts)}. All ranks must "
        "make the same calls in the same order with tensors of equal dtype and size: look for code that only some "
        "ranks run, and for models or batches that differ between ranks."
    )


def by_rank(texts: Sequence[str], shown: int = 4) -> str:
    """``ranks 0, 2: a; rank 1: b``: the first ``shown`` different texts, each with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    parts = [f"{ranks_text(group)}: {text}" for text, group in ranks.items()]
    return "; ".join(parts[:shown]) + (f"; and {len(parts) - shown} more" if len(parts) > shown else "")
