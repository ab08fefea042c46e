"""Plants faults for the doctor to find, and runs it as a user would: as a command, whose JSON is
read.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.processes import HANGS, clean_env, end_session

FAST = ("versions", "launcher", "mpi", "threads", "memory", "network")  # none of them imports torch


@dataclass(frozen=True)
class Report:
    code: int
    read: dict[str, Any]
    errors: str

    def find(self, name, host=0):
        """The finding of that name on a host, by its place in the report."""
        return next(
            (entry for entry in self.read["hosts"][host]["findings"] if entry["name"] == name), None
        )

    def between(self, name):
        found = [entry for entry in self.read["between_hosts"] if entry["name"] == name]
        assert len(found) == 1, self.read["between_hosts"]
        return found[0]


def doctor(*arguments, only=FAST, environment=None, within=(), **env):
    """``lightning-ring doctor --json``, run in ``environment`` (of `own_environment`) through the
    command ``within``.
    """
    python = sys.executable if environment is None else str(environment / "bin" / "python")
    words = ["-m", "lightning_ring.cli.main", "doctor", "--json"]
    command = [*within, python, *words, *arguments, "--only", *only]
    process = subprocess.Popen(
        command,
        env=clean_env(**env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=HANGS)
    except subprocess.TimeoutExpired:
        end_session(process)
        raise AssertionError(
            f"{command} did not end within {HANGS} s: {process.communicate(timeout=60)}"
        ) from None
    assert process.returncode in (0, 1), errors
    report = Report(process.returncode, json.loads(output), errors)
    assert report.code == (report.read["state"] == "broken"), output
    return report


def program(folder, name, script):
    """A shell script that can be run by its name."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


def first_on_path(folder):
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def own_environment(folder):
    """A virtual environment that has all that this one has, through links: what is in it can be
    changed by itself.
    """
    real = Path(sysconfig.get_paths()["purelib"])
    packages = (
        folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    )
    packages.mkdir(parents=True)
    for entry in real.iterdir():
        (packages / entry.name).symlink_to(entry)
    (folder / "bin").mkdir()
    base = Path(getattr(sys, "_base_executable", sys.executable))
    (folder / "bin" / "python").symlink_to(base.resolve())
    (folder / "pyvenv.cfg").write_text(
        f"home = {base.resolve().parent}\ninclude-system-site-packages = false\n"
    )
    return folder


def packages_of(environment):
    return next((environment / "lib").glob("python*/site-packages"))


def change_metadata(environment, package, pattern, new):
    """Replace what ``pattern`` finds by ``new`` in what pip wrote about ``package``; returns the
    changed folder.
    """
    link = next(packages_of(environment).glob(f"{package}-*.dist-info"))
    real = link.resolve()
    link.unlink()
    shutil.copytree(real, link)
    text, count = re.subn(
        pattern, new, (link / "METADATA").read_text(), count=1, flags=re.MULTILINE
    )
    assert count == 1, f"{package} has no {pattern!r}"
    (link / "METADATA").write_text(text)
    return link


def with_mounts(*commands):
    """What runs a command after ``commands`` of mount, in a view of the file system that nobody
    else has; `None` where that is not allowed."""
    for unshare in (
        ["unshare", "--mount", "--uts"],
        ["unshare", "--user", "--map-root-user", "--mount", "--uts"],
    ):
        within = [*unshare, "sh", "-c", " && ".join([*commands, 'exec "$0" "$@"'])]
        if (
            shutil.which("unshare")
            and not subprocess.run([*within, "true"], capture_output=True, timeout=60).returncode
        ):
            return within
    return None
