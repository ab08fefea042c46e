"""Runs every ``check_*`` function of one module, or of a folder of modules, on all ranks of one launch, so that many
checks share one start-up.

``mpirun -n 2 python -m tests.battery tests.checks.comm OUT_DIR`` writes ``OUT_DIR/<rank>.json``:
``{check name: null, or its traceback}``. Checks run in the order of the file (files: of the alphabet), each after a
barrier of its own; names after OUT_DIR choose some. A check may take ``tmp_path`` (a folder shared by all ranks).
"""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import json
import sys
import traceback
from pathlib import Path

import pytest

from tests.launch import ROOT, mpirun


def checks_of(module: str) -> dict[str, str]:
    """The checks of ``module``, a file or a folder of files, and the file that each is in.

    Read from their text, so that collecting tests imports nothing heavy.
    """
    path = ROOT / module.replace(".", "/")
    files = {f"{module}.{file.stem}": file for file in sorted(path.glob("*.py"))} or {module: path.with_suffix(".py")}
    found: dict[str, str] = {}
    for name, file in files.items():
        checks = [line[4 : line.index("(")] for line in file.read_text().splitlines() if line.startswith("def check_")]
        twice = found.keys() & checks
        assert not twice, f"{twice} in {name} and elsewhere in {module}"
        found |= dict.fromkeys(checks, name)
    return found


def check_names(module: str) -> list[str]:
    return list(checks_of(module))


class Battery:
    """Results of one module's checks at one world size; the launch happens when the first result is asked for."""

    def __init__(self, tmp: Path) -> None:
        self._tmp = tmp
        self._results: dict[tuple[object, ...], tuple[dict[int, dict[str, str | None]], str]] = {}

    def __call__(
        self, module: str, world_size: int, check: str, timeout: float = 240, only: tuple[str, ...] = (), **env: str
    ) -> None:
        """Fail with the traceback of every rank on which ``check`` failed, or with the output if it never ended."""
        key = (module, world_size, *sorted(env.items()))
        if key not in self._results:
            out = self._tmp / f"{module}-{world_size}-{len(self._results)}"
            out.mkdir()
            try:
                output = mpirun(
                    world_size, "-m", "tests.battery", module, str(out), *only, timeout=timeout, **env
                ).stdout
            except AssertionError as late:
                output = str(late)
            files = {rank: out / f"{rank}.json" for rank in range(world_size)}
            results = {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}
            self._results[key] = results, output
        results, output = self._results[key]
        failures = []
        for rank in range(world_size):
            if check not in results.get(rank, {}):
                failures.append(f"rank {rank} did not finish {check}")
            elif (failure := results[rank][check]) is not None:
                failures.append(f"rank {rank}:\n{failure}")
        if failures:
            pytest.fail("\n".join(failures) + f"\n--- output of the ranks (last 4,000 characters)\n{output[-4000:]}")


def main(module_name: str, out: str, *only: str) -> None:
    from mpi4py import MPI  # deferred: pytest imports this file too, and MPI must start in the ranks only

    world = MPI.COMM_WORLD
    files = checks_of(module_name)
    results: dict[str, str | None] = {}
    for name in only or files:
        module = importlib.import_module(files[name])
        world.Barrier()
        faulthandler.dump_traceback_later(100, exit=True)  # a check that hangs shows where, and ends the launch
        check = getattr(module, name)
        kwargs = {}
        if "tmp_path" in inspect.signature(check).parameters:
            kwargs["tmp_path"] = Path(out) / name
            kwargs["tmp_path"].mkdir(exist_ok=True)
        try:
            check(**kwargs)
            results[name] = None
        except BaseException:
            results[name] = traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        (Path(out) / f"{world.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
