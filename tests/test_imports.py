"""Imports point one way: errors, comm, gradients, strategy; Lightning stays at the top
(docs/architecture.md).
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, clean_env

PACKAGE = ROOT / "lightning_ring"
ROOMS = sorted(
    {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in PACKAGE.rglob("*.py")}
)
MAY_IMPORT_LIGHTNING = {"integrations", "monitor"}
ALLOWED = {  # room: the rooms that it may import
    "errors": set(),
    "host": {"errors"},
    "comm": {"errors", "host"},
    "job": {"comm", "errors", "host"},
    "gradients": {"comm", "errors", "host"},
    "algorithms": {"comm", "errors", "gradients", "optim"},
    "options": {"algorithms", "comm", "errors", "gradients", "timeline"},
    "membership": {"errors", "job"},
    "launch": {"errors", "host", "job", "membership"},
    "timeline": {"comm", "errors", "host"},
    "optim": {"errors"},
    "schedules": {"errors"},
    "data": {"errors", "host"},
    "retrieval": {"errors"},
    "tools": {"comm", "errors", "host", "job", "launch", "membership"},
    "monitor": {"comm", "errors", "host", "timeline", "tools"},
    "cli": {"data", "errors", "host", "job", "launch", "timeline", "tools"},
    "elastic": {"algorithms", "comm", "errors", "gradients", "host", "job", "membership"},
    "integrations": {
        *(
            "algorithms",
            "comm",
            "data",
            "elastic",
            "errors",
            "gradients",
            "host",
            "job",
            "launch",
            "membership",
        ),
        *("loops", "monitor", "options", "timeline"),
    },
    "loops": {
        *(
            "algorithms",
            "comm",
            "errors",
            "gradients",
            "host",
            "job",
            "launch",
            "options",
            "timeline",
        ),
    },
    "horovod": {"comm", "elastic", "errors", "gradients", "host", "job", "membership"},
    "__init__": {"errors", "host", "integrations", "loops"},
}


def imported(module: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room: str) -> None:
    for module in [PACKAGE / f"{room}.py", *(PACKAGE / room).rglob("*.py")]:
        names = imported(module) if module.exists() else set()
        if room not in MAY_IMPORT_LIGHTNING:
            assert not {
                name for name in names if name.split(".")[0] in ("lightning", "pytorch_lightning")
            }, module
        rooms = {name.split(".")[1] for name in names if name.startswith("lightning_ring.")}
        assert rooms <= ALLOWED[room] | {room}, module


def run_code(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], env=clean_env(), capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.ranks
@pytest.mark.parametrize(
    "order", ["import lightning_ring, lightning.pytorch", "import lightning, lightning_ring"]
)
def test_importing_the_package_registers_ring_in_any_order_and_starts_no_mpi(order: str) -> None:
    code = (
        f"{order}; import sys; from lightning.pytorch.strategies import StrategyRegistry as r; "
        "assert 'ring' in r; assert 'mpi4py' not in sys.modules; assert "
        "r.get('ring_sharded').options.algorithm.sharded; print(type(r.get('ring')).__name__, "
        "lightning_ring.__all__)"
    )
    names = ["ElasticStrategy", "RingError", "RingFabricStrategy", "RingStrategy", "distribute"]
    assert run_code(code) == f"RingStrategy {names}"


@pytest.mark.ranks
def test_importing_a_strategy_loads_what_a_rank_trains_with_and_nothing_else() -> None:
    code = (
        "import sys; from lightning_ring import RingStrategy; "
        "print(*(name for name in sys.modules if name.startswith('lightning_ring.')))"
    )
    loaded = run_code(code).split()
    others = {*("cli", "data", "elastic", "horovod", "launch", "loops", "membership", "monitor")}
    others |= {"optim", "tools"}
    assert not {name for name in loaded if name.split(".")[1] in others}
    for path in ("integrations.lightning.elastic", "algorithms.sharded", "algorithms.local"):
        assert f"lightning_ring.{path}" not in loaded
    assert len(loaded) <= 120


def test_importing_the_package_imports_neither_lightning_nor_torch() -> None:
    print_names = "print(sorted(sys.modules.keys() & {'lightning', 'torch', 'mpi4py'}))"
    modules = (
        "lightning_ring, lightning_ring.cli.ringrun, lightning_ring.cli.doctor, "
        "lightning_ring.launch.elastic, lightning_ring.membership.member"
    )
    assert run_code(f"import {modules}, sys; {print_names}") == "[]"


@pytest.mark.ranks
def test_packing_needs_no_torch_and_what_the_data_room_names_is_there() -> None:
    code = (
        "import sys, lightning_ring.data.packing.run, lightning_ring.data.shards.verify; "
        "assert 'torch' not in sys.modules; "
        "import lightning_ring.data as d; assert set(d.__all__) <= set(dir(d)); "
        "print(all(getattr(d, name).__name__ == name for name in d.__all__), hasattr(d, 'Nothing'))"
    )
    assert run_code(code) == "True False"


@pytest.mark.ranks
def test_the_strategy_itself_may_be_imported_first() -> None:
    assert (
        run_code(
            "from lightning_ring.integrations.lightning.strategy import RingStrategy as R; "
            "print(R.strategy_name)"
        )
        == "ring"
    )


@pytest.mark.ranks
@pytest.mark.parametrize(
    "order", ["lightning_ring, pytorch_lightning", "pytorch_lightning, lightning_ring"]
)
def test_the_trainer_of_the_other_package_says_which_package_to_use(order: str) -> None:
    code = f"import {order}; pytorch_lightning.Trainer(strategy='ring', accelerator='cpu')"
    result = subprocess.run(
        [sys.executable, "-c", code], env=clean_env(), capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 1
    assert (
        "ConfigurationError: Trainer(strategy='ring') of pytorch_lightning was called"
        in result.stderr
    )
