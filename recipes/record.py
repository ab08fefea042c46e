"""A study's memory: one JSON line per finished run, so that an interrupted study goes on where it
stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Result = dict[str, Any]


def read(file: Path) -> dict[str, Result]:
    """Finished runs by key. A last line that was cut short by an interruption is removed from
    the file.
    """
    if not file.exists():
        return {}
    results, whole = {}, 0
    content = file.read_bytes()
    for line in content.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        result = json.loads(line)
        results[result["key"]] = result
        whole += len(line)
    if whole < len(content):
        file.write_bytes(content[:whole])
    return results


def finish(
    runs: Mapping[str, T],
    execute: Callable[[T], Result],
    say: Callable[[Result], str],
    file: Path,
    workers: int,
) -> dict[str, Result]:
    """Every run's result by key: those on record as they are, the others run now, ``workers`` at
    once.

    Args:
        runs: By key. Those that take longest first, so that no worker waits for one at the end.
        execute: Computes a result, which has its run's ``"key"``. Picklable.
        say: One line about a result.
    """
    results = read(file)
    missing = {key: run for key, run in runs.items() if key not in results}
    with file.open("a") as record:
        for number, result in enumerate(each(missing.values(), execute, workers), 1):
            record.write(json.dumps(result) + "\n")
            record.flush()
            results[result["key"]] = result
            print(f"{number}/{len(missing)} {say(result)}", flush=True)
    return results


def each(runs: Iterable[T], execute: Callable[[T], Result], workers: int) -> Iterator[Result]:
    """Results as they come. With one worker they are computed here."""
    if workers == 1:
        yield from map(execute, runs)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(execute, run) for run in runs]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
