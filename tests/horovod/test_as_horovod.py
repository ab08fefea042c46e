"""`python -m lightning_ring.horovod`: a script that names Horovod runs unchanged, as ``python
script.py`` runs it.
"""

import json
import subprocess
import sys

import pytest

from lightning_ring.horovod.as_horovod import Names, main
from tests import forked
from tests.processes import ROOT, clean_env

SCRIPT = """
from __future__ import annotations
import horovod
import horovod.torch as hvd
from horovod.torch.mpi_ops import Average
from horovod.common.exceptions import HorovodInternalError
import horovod.torch.elastic
from horovod.torch.elastic.state import TorchState
import json, pickle, subprocess, sys
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
    print(json.dumps({
        "argv": sys.argv, "file": __file__, "path": sys.path[0], "spec": spec, "package": __package__,
        "size": hvd.size(), "version": horovod.__version__,
        "average": Average is hvd.Average, "error": HorovodInternalError is hvd.HorovodInternalError,
        "elastic": TorchState is hvd.elastic.TorchState is horovod.torch.elastic.TorchState,
        "workers": list(DataLoader(Names(), batch_size=None, num_workers=1, multiprocessing_context="spawn")),
        "child": by_name("from importlib.util import find_spec; print(find_spec('horovod').origin)"),
        "pickled": type(pickle.loads(pickle.dumps(Names()))).__module__,
    }))
    if "fail" in sys.argv:
        def broken():
            raise LookupError("no such column")
        broken()
"""


def run_in(folder, python, *arguments):
    command = [*python, "-m", "lightning_ring.horovod", *arguments]
    return subprocess.run(
        command, cwd=folder, env=clean_env(), capture_output=True, text=True, timeout=240
    )


@pytest.mark.ranks
def test_a_script_is_main_and_its_processes_find_horovod_too(tmp_path):
    (tmp_path / "scripts" / "horovod").mkdir(parents=True)  # not what is imported
    (tmp_path / "scripts" / "train.py").write_text(SCRIPT)
    done = run_in(tmp_path, [sys.executable], "scripts/train.py", "--lr", "1", "fail")
    said = json.loads(done.stdout)
    assert said == {
        "argv": [str(tmp_path / "scripts" / "train.py"), "--lr", "1", "fail"],
        "file": str(tmp_path / "scripts" / "train.py"),
        "path": str(tmp_path / "scripts"),
        "spec": None,
        "package": "",
        "size": 1,
        "version": "0.28.1",
        "average": True,
        "error": True,
        "elastic": True,
        "workers": ["lightning_ring.horovod True"] * 2,
        "child": str(ROOT / "lightning_ring/horovod/as_horovod/on_path/horovod/__init__.py"),
        "pickled": "__main__",
    }
    assert done.returncode == 1
    assert "lightning_ring: `import horovod` gives lightning_ring.horovod\n" in done.stderr
    assert f'  File "{tmp_path}/scripts/train.py", line ' in done.stderr
    assert "LookupError: no such column" in done.stderr.splitlines()[-1]


@pytest.mark.ranks
def test_a_module_is_main(tmp_path):
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "__init__.py").write_text("")
    (tmp_path / "tool" / "__main__.py").write_text(
        "import sys; from . import __name__ as package; from horovod.torch import size\n"
        "print(__name__, __spec__.name, package, sys.argv[1:], size.__module__)\n"
    )
    done = run_in(tmp_path, forked.python(), "-m", "tool", "a", "-m")
    assert (
        done.stdout == "__main__ tool.__main__ tool ['a', '-m'] lightning_ring.horovod.context\n"
    ), done.stderr
    assert done.returncode == 0


def test_what_cannot_be_run(capsys):
    assert main(["absent.py"]) == 2
    assert "absent.py: there is no such file. usage: python -m" in capsys.readouterr().err
    assert main([]) == 2
    assert "usage: python -m lightning_ring.horovod SCRIPT.py" in capsys.readouterr().err


def test_modules_without_a_counterpart_are_said_to_have_none():
    with pytest.raises(ModuleNotFoundError, match=r"horovod\.torch, and no horovod\.keras"):
        Names().find_spec("horovod.keras", None)
    assert Names().find_spec("torch.keras", None) is None
