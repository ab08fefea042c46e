"""Families of checks, in the order of the report, and how they are run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from lightning_ring.tools.doctor import gpus, imports, launcher, memory, mpi, network, reduction, threads, versions
from lightning_ring.tools.doctor.asking import end_all
from lightning_ring.tools.doctor.finding import Finding, broken
from lightning_ring.tools.doctor.request import Request

FAMILIES: dict[str, Callable[[Request], list[Finding]]] = {
    "versions": versions.check,
    "launcher": launcher.check,
    "mpi": mpi.check,
    "threads": threads.check,
    "memory": memory.check,
    "network": network.check,
    "gpus": gpus.check,
    "imports": imports.check,
    "all-reduce": reduction.check,
}


def examine(request: Request, chosen: Sequence[str]) -> Iterator[tuple[str, list[Finding]]]:
    """Each chosen family and what it found, as soon as it and those before it are done. They run side by side, for
    most of them wait for other processes."""
    families = [family for family in FAMILIES if family in chosen]
    with ThreadPoolExecutor(max_workers=max(1, len(families))) as pool:
        try:
            futures = [pool.submit(_guarded, family, request) for family in families]
            for family, future in zip(families, futures, strict=True):
                yield family, future.result()
        except BaseException:  # told to stop: the pool would otherwise wait for what its threads wait for
            end_all()
            raise


def _guarded(family: str, request: Request) -> list[Finding]:
    try:
        return FAMILIES[family](request)
    except Exception as error:  # of all programs this one has to survive what it did not foresee
        found = f"this check failed: {type(error).__name__}: {error}"
        return [broken(family, found, "The other lines hold. Please report this one to lightning_ring.")]
