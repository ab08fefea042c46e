"""`python -m lightning_ring.horovod`: a script that names Horovod runs unchanged, as ``python
script.py`` runs it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_ring.horovod.as_horovod import names
from lightning_ring.horovod.as_horovod import run as run_module
from lightning_ring.horovod.as_horovod.run import main
from tests.processes import ROOT, clean_env

SCRIPT = """
from __future__ import annotations
import horovod
import horovod.torch as hvd
from horovod.torch.mpi_ops import Average
from horovod.common.exceptions import HorovodInternalError
import horovod.torch.elastic
from horovod.torch.elastic.state import TorchState
import atexit, json, multiprocessing, os, pickle, subprocess, sys
from torch.utils.data import DataLoader, Dataset

class Names(Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return f"{hvd.__name__} {sys.modules['horovod.torch'] is hvd}"

def by_name(line):
    return subprocess.run([sys.executable, "-c", line], capture_output=True, text=True).stdout.strip()

if __name__ == "__main__":
    hvd.init()
    spec = __spec__.name if __spec__ else None
    pickled = pickle.dumps(Names())
    atexit.register(lambda: print(json.dumps({"at the end": type(pickle.loads(pickled)).__module__})))
    print(json.dumps({
        "argv": sys.argv, "file": __file__, "path": sys.path[0], "spec": spec, "package": __package__,
        "size": hvd.size(), "version": horovod.__version__,
        "average": Average is hvd.Average, "error": HorovodInternalError is hvd.HorovodInternalError,
        "elastic": TorchState is hvd.elastic.TorchState is horovod.torch.elastic.TorchState,
        "workers": list(DataLoader(Names(), batch_size=None, num_workers=1, multiprocessing_context="spawn")),
        "child": by_name("from importlib.util import find_spec; print(find_spec('horovod').origin)"),
        "annotations": list(__annotations__) if "__annotations__" in globals() else None,
    }))
    if "fail" in sys.argv:
        def broken():
            raise LookupError("no such column")
        broken()
"""


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightning_ring.horovod", *arguments]
    return subprocess.run(
        command, cwd=folder, env=clean_env(), capture_output=True, text=True, timeout=240
    )


@pytest.mark.ranks
def test_a_script_is_main_and_its_processes_find_horovod_too(tmp_path: Path) -> None:
    (tmp_path / "scripts" / "horovod").mkdir(parents=True)  # not what is imported
    (tmp_path / "scripts" / "train.py").write_text(SCRIPT)
    done = run_in(tmp_path, "scripts/train.py", "--lr", "1", "fail")
    said, end = (json.loads(line) for line in done.stdout.splitlines())
    assert end == {"at the end": "__main__"}
    assert said == {
        "argv": ["scripts/train.py", "--lr", "1", "fail"],
        "file": str(tmp_path / "scripts" / "train.py"),
        "path": str(tmp_path / "scripts"),
        "spec": None,
        "package": None,
        "size": 1,
        "version": "0.28.1",
        "average": True,
        "error": True,
        "elastic": True,
        "workers": ["lightning_ring.horovod True"] * 2,
        "child": str(ROOT / "lightning_ring/horovod/as_horovod/on_path/horovod/__init__.py"),
        "annotations": None,
    }
    assert done.returncode == 1
    assert "lightning_ring: `import horovod` gives lightning_ring.horovod\n" in done.stderr
    trace = done.stderr[done.stderr.index("Traceback") :].splitlines()
    # torch puts the rank in front
    assert f'  File "{tmp_path}/scripts/train.py", line ' in trace[1]
    assert "LookupError: no such column" in "".join(trace[-2:])
    assert "as_horovod" not in "".join(trace)


@pytest.mark.ranks
def test_a_module_is_main(tmp_path: Path) -> None:
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "__init__.py").write_text("")
    (tmp_path / "tool" / "__main__.py").write_text(
        "import sys; from . import __name__ as package; from horovod.torch import size\n"
        "print(__name__, __spec__.name, package, sys.argv[1:], size.__module__)\n"
    )
    done = run_in(tmp_path, "-m", "tool", "a", "-m")
    assert (
        done.stdout == "__main__ tool.__main__ tool ['a', '-m'] lightning_ring.horovod.context\n"
    ), done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["absent.py"], "absent.py: No such file or directory"),
        (["-m", "absent"], "-m absent: there is no such module"),
        (["-m", "json"], "or it is a package without __main__.py"),
        ([], "usage: python -m lightning_ring.horovod SCRIPT.py"),
    ],
)
def test_what_cannot_be_run(
    arguments: list[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(run_module, "_put_on_path", lambda: None)
    assert main(arguments) == 2
    assert text in capsys.readouterr().err


def test_modules_without_a_counterpart_are_said_to_have_none() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"horovod\.torch, and no horovod\.keras"):
        names._Names().find_spec("horovod.keras", None)
    assert names._Names().find_spec("torch.keras", None) is None
