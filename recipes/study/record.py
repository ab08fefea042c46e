"""The study's memory: one JSON line per finished run, so that an interrupted study goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from recipes.study.run import Run, Settings, execute

Result = dict[str, Any]


def read(file: Path) -> dict[str, Result]:
    """Finished runs by key. A last line that was cut short by an interruption is removed from the file."""
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


def finish(runs: Iterable[Run], settings: Settings, file: Path, workers: int) -> dict[str, Result]:
    """Every run's result by key: those on record as they are, the others run now, ``workers`` at once."""
    results = read(file)
    missing = {run.key(settings): run for run in runs if run.key(settings) not in results}
    with file.open("a") as record:
        for number, result in enumerate(each(missing.values(), settings, workers), 1):
            record.write(json.dumps(result) + "\n")
            record.flush()
            results[result["key"]] = result
            print(
                f"{number}/{len(missing)} {result['part']}: {result['method']}, batch {result['batch_size']}, "
                f"lr {result['lr']:.4g}, seed {result['seed']}: accuracy {result['accuracy']:.4f} "
                f"({result['steps']} steps, {result['seconds']} s)",
                flush=True,
            )
    return results


def each(runs: Iterable[Run], settings: Settings, workers: int) -> Iterator[Result]:
    """Results as they come. With one worker they are computed here."""
    if workers == 1:
        yield from (execute(run, settings) for run in runs)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        # Small batches take longest: first, so that no core waits for one at the end.
        ordered = sorted(runs, key=lambda run: run.batch_size)
        futures = [pool.submit(execute, run, settings) for run in ordered]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
