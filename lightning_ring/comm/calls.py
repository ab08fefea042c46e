"""Checks of collective calls: a difference between ranks is an error, and not a hang."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ring.comm.waiting import ranks_text
from lightning_ring.errors import CollectiveError, ConfigurationError

HEADER_BYTES = 128
_DIGEST_BYTES = 8
_DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)


def describe(kind: str, *details: object, name: str = "") -> str:
    """``all_reduce "bucket 3" (sum, float32, 1024 elements)``."""
    shown = ", ".join(str(detail).removeprefix("torch.") for detail in details)
    return kind + (f' "{name}"' if name else "") + (f" ({shown})" if shown else "")


def of_tensor(kind: str, tensor: Tensor, name: str, *details: object) -> str:
    """`describe` a collective of ``tensor``."""
    return describe(kind, *details, tensor.dtype, f"{tensor.numel()} elements", name=name)


def header(description: str) -> Tensor:
    """``description`` as `HEADER_BYTES` of uint8: a digest, then as much text as fits."""
    text = description.encode()
    digest = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
    return torch.frombuffer(
        bytearray((digest + text)[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8
    )


def check_agreement(headers: Tensor, call: int) -> None:
    """Raise `CollectiveError`, the same on every rank, if the ``headers`` (one row a rank) of the
    ``call``-th call differ."""
    if torch.equal(headers, headers[:1].expand_as(headers)):
        return
    texts = [
        bytes(row[_DIGEST_BYTES:].tolist()).rstrip(b"\0").decode(errors="ignore")
        for row in headers.cpu()
    ]
    raise disagreement(call, texts)


def disagreement(call: int, texts: Sequence[str]) -> CollectiveError:
    """The error of every rank if the ``call``-th one is ``texts[r]`` on rank r."""
    return CollectiveError(
        f"the ranks called different collectives (call {call} of this communicator): "
        f"{by_rank(texts)}. All ranks must make the same calls in the same order with tensors of "
        "equal dtype and size: look for code that only some ranks run, and for models or batches "
        "that differ between ranks."
    )


def by_rank(texts: Sequence[str], shown: int = 4) -> str:
    """``ranks 0, 2: a; rank 1: b``: the first ``shown`` different texts."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    parts = [f"{ranks_text(group)}: {text}" for text, group in ranks.items()]
    return "; ".join(parts[:shown]) + (
        f"; and {len(parts) - shown} more" if len(parts) > shown else ""
    )


def check_rank(rank: int, world_size: int, argument: str) -> None:
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"{argument}={rank}, but ranks go from 0 to {world_size - 1}.")


def check_all_to_all(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], world_size: int, what: str
) -> None:
    if len(inputs) != world_size or len(outputs) != world_size:
        raise ConfigurationError(
            f"{what}: {len(inputs)} inputs and {len(outputs)} outputs for {world_size} ranks; give "
            "one of each a rank."
        )


def sizes_and_dtypes(tensors: Sequence[Tensor]) -> Tensor:
    """Each tensor's bytes and dtype as one number; 0 for an empty one."""
    return torch.tensor(
        [
            tensor.nbytes << 8 | _DTYPES.index(tensor.dtype) if tensor.numel() else 0
            for tensor in tensors
        ]
    )


def check_sizes(sizes: Tensor, what: str) -> int:
    """Raise `CollectiveError`, the same on every rank, if sent and expected sizes differ.

    ``sizes``: one row per rank, `sizes_and_dtypes` of its inputs, then of its outputs. Returns the
    most bytes.
    """
    world_size = sizes.shape[0]
    sent, expected = sizes[:, :world_size], sizes[:, world_size:].t()
    wrong = (sent != expected).nonzero().tolist()
    if wrong:
        source, target = wrong[0]
        raise CollectiveError(
            f"{what}: rank {source} sends {_in_words(sent[source, target])} to rank {target}, "
            f"which expects {_in_words(expected[source, target])} ({len(wrong)} of {world_size**2} "
            "pairs differ). Exchange the sizes first, and use one dtype."
        )
    return int(sizes.max()) >> 8


def _in_words(size_and_dtype: Tensor) -> str:
    num_bytes, dtype = int(size_and_dtype) >> 8, _DTYPES[int(size_and_dtype) & 0xFF]
    return f"{num_bytes} bytes" + (f" of {str(dtype).removeprefix('torch.')}" if num_bytes else "")


def contiguous_flat(tensor: Tensor, method: str) -> Tensor:
    if tensor.device.type != "cpu":
        raise ConfigurationError(
            f"{method}: this backend moves CPU tensors, not {tensor.device}. Use NCCL for CUDA."
        )
    if not tensor.is_contiguous():
        raise ConfigurationError(
            f"{method} works in place and needs a contiguous tensor; this one is a strided view."
        )
    if tensor.is_conj() or tensor.is_neg():  # its memory holds other numbers
        raise ConfigurationError(
            f"{method} works in place, and this tensor is a conjugate or negative view of another "
            "one. Give it tensor.resolve_conj().resolve_neg()."
        )
    return tensor.detach().view(-1)
