"""Runs every ``check_*`` function of one module, or of a folder of modules, on all ranks, many
modules in one launch.

Starting ranks costs seconds, most of them imports. So the ranks of a launch (a world size and an
environment) stay when a module is through, blocked in the kernel, until the next one is asked for
or the session ends; a launch that a check ended or that is late is replaced by a new one.

Each rank reads orders from a FIFO, one a line: ``module TAB folder TAB check TAB check ...`` (no
checks: all). After each check it writes ``folder/<rank>.json``, ``{check name: null, or its
traceback}``, and ``folder/<rank>.done`` in the end. Checks run in the order of the file (files: of
the alphabet), each after a barrier of its own. A check may take the argument ``tmp_path`` (a folder
shared by all ranks).

By hand: ``mpirun -n 2 python -m tests.battery tests.checks.comm FOLDER [CHECK ...]``.
"""

import ast
import faulthandler
import importlib
import inspect
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

from tests import forked
from tests.checks import marks
from tests.processes import ROOT, end_session, mpirun_command, start

IDLE_RANKS = 8  # of all launches together: each takes some 200 MB


def checks_of(module, mark=""):
    """The checks of ``module``, a file or a folder of files, and the file that each is in.

    Read from their text, so that collecting tests imports nothing heavy.

    Args:
        mark: Only the checks with this decorator, one of `tests.checks.marks`.
    """
    assert not mark or hasattr(marks, mark), mark
    path = ROOT / module.replace(".", "/")
    files = {f"{module}.{file.stem}": file for file in sorted(path.glob("*.py"))} or {
        module: path.with_suffix(".py")
    }
    found = {}
    for name, file in files.items():
        functions = [
            node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)
        ]
        checks = [
            function.name
            for function in functions
            if function.name.startswith("check_")
            and (not mark or mark in [getattr(one, "id", "") for one in function.decorator_list])
        ]
        twice = found.keys() & checks
        assert not twice, f"{twice} in {name} and elsewhere in {module}"
        found |= dict.fromkeys(checks, name)
    return found


def check_names(module, mark=""):
    return list(checks_of(module, mark))


class Launch:
    """Ranks under one mpirun that run checks when they are told to. They end when this process
    does.
    """

    def __init__(self, folder, world_size, env):
        self.world_size = world_size
        self._output = folder / "output"
        fifos = [folder / f"{rank}.orders" for rank in range(world_size)]
        for fifo in fifos:
            os.mkfifo(fifo)
        # for reading too: opening it for writing alone would wait for the rank
        self._orders = [os.open(fifo, os.O_RDWR | os.O_CLOEXEC) for fifo in fifos]
        with self._output.open("w") as output:
            rank = [*forked.python(), "-m", "tests.battery", str(folder)]
            self._process = start(mpirun_command(world_size, *rank), output, **env)

    def run(self, module, only, out, timeout):
        """Run checks of ``module`` on all ranks; what the ranks printed meanwhile. Ends the
        launch if that is late.
        """
        begin = self._output.stat().st_size
        for orders in self._orders:
            os.write(orders, ("\t".join([module, str(out), *only]) + "\n").encode())
        deadline = time.monotonic() + timeout
        while self.is_alive() and len(list(out.glob("*.done"))) < self.world_size:
            if time.monotonic() > deadline:
                self.kill()
                return f"{module} did not end within {timeout} s. {self._said(begin)}"
            time.sleep(0.02)
        return self._said(begin)

    def _said(self, begin):
        return self._output.read_bytes()[begin:].decode(errors="replace")

    def is_alive(self):
        return self._process.poll() is None

    def dismiss(self):
        """The ranks read the end of their orders, and end."""
        for orders in self._orders:
            os.close(orders)
        self._orders.clear()

    def end(self, timeout=20):
        self.dismiss()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self):
        self.dismiss()
        end_session(self._process)
        self._process.wait(60)


class Battery:
    """Results of modules at world sizes; a module runs when the first result is asked for."""

    def __init__(self, tmp):
        self._tmp = tmp
        self._launches = {}  # the one used last at the end
        self._results = {}

    def left_by(self, module, world_size, check):
        """The ``tmp_path`` of a check that has run."""
        return max(
            self._tmp.glob(f"{module}-{world_size}-*/{check}"),
            key=lambda folder: folder.stat().st_mtime,
        )

    def __call__(self, module, world_size, check, timeout=240, only=(), **env):
        """Fail with the traceback of every rank on which ``check`` failed, or with the output if
        it never ended.
        """
        key = (module, world_size, only, *sorted(env.items()))
        if key not in self._results:
            out = self._tmp / f"{module}-{world_size}-{len(self._results)}"
            out.mkdir()
            output = self._launch(world_size, env).run(module, only, out, timeout)
            files = {rank: out / f"{rank}.json" for rank in range(world_size)}
            results = {
                rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()
            }
            self._results[key] = results, output
        results, output = self._results[key]
        failures = []
        for rank in range(world_size):
            if check not in results.get(rank, {}):
                failures.append(f"rank {rank} did not finish {check}")
            elif (failure := results[rank][check]) is not None:
                failures.append(f"rank {rank}:\n{failure}")
        if failures:
            pytest.fail(
                "\n".join(failures) + "\n--- output of the ranks (last 4,000 "
                f"characters)\n{output[-4000:]}"
            )

    def _launch(self, world_size, env):
        key = (world_size, *sorted(env.items()))
        launch = self._launches.pop(key, None)
        if launch is not None and not launch.is_alive():
            launch.end()
            launch = None
        if launch is None:
            while (
                self._launches
                and sum(each.world_size for each in self._launches.values()) + world_size
                > IDLE_RANKS
            ):
                self._launches.pop(next(iter(self._launches))).end()
            folder = self._tmp / f"launch-{time.monotonic_ns()}"
            folder.mkdir()
            launch = Launch(folder, world_size, env)
        self._launches[key] = launch
        return launch

    def close(self):
        for launch in self._launches.values():
            launch.dismiss()
        for launch in self._launches.values():
            launch.end()


def run_checks(module, out, only):
    # deferred: pytest imports this file too, and MPI must start in the ranks only
    from tests.checks.ranks import WORLD

    files = checks_of(module)
    results = {}
    for name in only or files:
        check = getattr(importlib.import_module(files[name]), name)
        WORLD.Barrier()
        # a check that hangs shows where, and ends the launch
        faulthandler.dump_traceback_later(100, exit=True)
        kwargs = {}
        if "tmp_path" in inspect.signature(check).parameters:
            kwargs["tmp_path"] = out / name
            kwargs["tmp_path"].mkdir(exist_ok=True)
        try:
            check(**kwargs)
            results[name] = None
        except BaseException:
            results[name] = traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        (out / f"{WORLD.rank}.json").write_text(json.dumps(results))
    (out / f"{WORLD.rank}.done").touch()


def follow_orders(folder):
    from mpi4py import MPI

    with Path(folder, f"{MPI.COMM_WORLD.rank}.orders").open() as orders:
        for order in orders:
            module, out, *only = order.rstrip("\n").split("\t")
            run_checks(module, Path(out), only)
    MPI.Finalize()
    os._exit(0)  # to take all that was imported down again lasts seconds


def main(first, *rest):
    if rest:
        run_checks(first, Path(rest[0]), list(rest[1:]))
    else:
        follow_orders(first)


if __name__ == "__main__":
    main(*sys.argv[1:])
