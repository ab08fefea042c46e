"""A study's memory, a JSON line a finished run: an interrupted one goes on where it stopped."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Result = dict[str, Any]


def key_of(*parts: object) -> str:
    """A run's key in the record: the same for the same parts, which JSON can hold."""
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read(file: Path) -> dict[str, Result]:
    """Finished runs by key; a last line that was cut short is removed from the file."""
    if not file.exists():
        return {}
    content = file.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        file.write_bytes(whole)
    return {result["key"]: result for result in map(json.loads, whole.splitlines())}


def finish(
    runs: Mapping[str, T],
    execute: Callable[[T], Result],
    say: Callable[[Result], str],
    file: Path,
    workers: int,
) -> dict[str, Result]:
    """Every run's result by key: those on record as they are, the others run now, ``workers`` at
    once, in the order of ``runs``.

    ``execute`` is picklable; its result has the run's ``"key"``. ``say`` makes a line of a result.
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


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
