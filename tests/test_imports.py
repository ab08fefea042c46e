"""Imports point one way: errors, comm, gradients, strategy; Lightning stays at the top.

``python -m tests.test_imports`` writes the table of rooms into docs/architecture.md.
"""

import ast
import sys
from dataclasses import dataclass

import pytest

from tests.processes import ROOT, run

PACKAGE = ROOT / "lightning_ring"
PAGE = ROOT / "docs" / "architecture.md"
MAY_IMPORT_LIGHTNING = {"integrations", "monitor"}


@dataclass(frozen=True)
class Room:
    """What a room of the package answers, what lies in it, and which rooms it may import.

    ``errors`` may be imported by all.
    """

    question: str
    contents: str
    imports: str = ""

    @property
    def allowed(self):
        return {"errors", *self.imports.split()}


ROOMS = {
    "integrations": Room(
        "Who calls us?",
        "`lightning/` (the Trainer's strategy), `fabric.py`, `ranks/` (launcher and environment)",
        "loops algorithms gradients job comm launch elastic host monitor timeline data options",
    ),
    "loops": Room(
        "How does a loop without a Trainer train?",
        "`distribute`, `Replicas` of one module",
        "algorithms gradients job comm launch host options timeline",
    ),
    "horovod": Room(
        "How do scripts for Horovod run?",
        "its API for PyTorch over our reducer",
        "gradients job comm elastic timeline host",
    ),
    "algorithms": Room(
        "What keeps the replicas together?",
        "averaging, `sharded/`, `local/`, `server/`",
        "gradients comm optim",
    ),
    "gradients": Room(
        "Which bytes are sent, when, in which format?",
        "buckets, the reducer, `compression/`",
        "comm host",
    ),
    "comm": Room(
        "Who moves the bytes?", "`Communicator`, rings, queues and waits, `backends/`", "host"
    ),
    "job": Room(
        "Who is in the job?",
        "launchers, `rendezvous/`, `watch/`, the stall report, exit codes",
        "comm host",
    ),
    "launch": Room(
        "Who starts the processes?",
        "mpirun's options, hosts, the supervisor, elastic jobs",
        "elastic job host",
    ),
    "elastic": Room(
        "How does a training go on when ranks die or come?",
        "the steward and its members, without torch; connections of each view; recovery",
        "job comm host",
    ),
    "optim": Room("How are parameters updated?", "LARS, LAMB, `engine/`", "host"),
    "schedules": Room("How does the learning rate change?", "scaling, warm-up"),
    "data": Room("Where do the samples come from?", "packing, shards, samplers, loader", "host"),
    "retrieval": Room("Which images look like this one?", "neighbours over the ranks, metrics"),
    "monitor": Room(
        "Where does a step's time go?",
        "callbacks for TensorBoard and the report",
        "comm host timeline tools",
    ),
    "timeline": Room("What happened when?", "traces for Perfetto", "comm host"),
    "tools": Room(
        "Is it set up right, how fast is it, how far will it scale?",
        "doctor, bench, plan, report",
        "launch job comm host",
    ),
    "cli": Room(
        "What does a command take?",
        "argument parsers of `lightning-ring` and `ringrun`",
        "tools launch job timeline data host",
    ),
    "host": Room("What does this machine offer?", "cores, malloc, random generators"),
    "options": Room(
        "What did the user ask for?",
        "arguments of the strategy, checked",
        "algorithms gradients comm timeline",
    ),
    "errors": Room("What can go wrong?", "`RingError` and those derived from it"),
    "__init__": Room("What is public?", "the names to import", "host integrations loops"),
}


def table():
    """The rooms as a table in Markdown."""
    lines = ["| question | room | contents | may import |", "|---|---|---|---|"]
    for name, room in ROOMS.items():
        path = f"{name}.py" if (PACKAGE / f"{name}.py").is_file() else f"{name}/"
        imports = ", ".join(f"`{one}`" for one in room.imports.split())
        lines.append(f"| {room.question} | `{path}` | {room.contents} | {imports} |")
    return "\n".join(lines)


def with_table(page):
    """``page`` with today's table between its two marks."""
    before, rest = page.split("<!-- rooms -->\n")
    _, after = rest.split("<!-- /rooms -->")
    return f"{before}<!-- rooms -->\n{table()}\n<!-- /rooms -->{after}"


def test_the_page_has_the_table_of_rooms():
    page = PAGE.read_text()
    assert page == with_table(page), "`python -m tests.test_imports` writes it"
    assert len(page.splitlines()) <= 200


def test_every_room_is_in_the_table():
    there = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in PACKAGE.rglob("*.py")}
    assert there == set(ROOMS)


def imported(module):
    names = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room):
    for module in [PACKAGE / f"{room}.py", *(PACKAGE / room).rglob("*.py")]:
        names = imported(module) if module.exists() else set()
        if room not in MAY_IMPORT_LIGHTNING:
            assert not {
                name for name in names if name.split(".")[0] in ("lightning", "pytorch_lightning")
            }, module
        rooms = {name.split(".")[1] for name in names if name.startswith("lightning_ring.")}
        assert rooms <= ROOMS[room].allowed | {room}, module


def run_code(code):
    result = run([sys.executable, "-c", code])
    assert result.returncode == 0, result.stdout
    return result.stdout.strip()


# Each order of imports in a process of its own, forked once what takes longest is imported.
FORKS = """
import os, sys, torchmetrics, torch.utils.tensorboard
assert not sys.modules.keys() & {"lightning", "pytorch_lightning", "lightning_ring", "mpi4py"}
for code in sys.argv[1:]:
    print("next", flush=True)
    if not os.fork():
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""
REGISTERED = (
    "; import sys; from lightning.pytorch.strategies import StrategyRegistry as r; "
    "assert 'ring' in r; assert 'mpi4py' not in sys.modules; assert "
    "r.get('ring_sharded').options.algorithm.sharded; print(type(r.get('ring')).__name__, "
    "lightning_ring.__all__)"
)
OTHER = "; pytorch_lightning.Trainer(strategy='ring', accelerator='cpu')"


@pytest.mark.ranks
def test_imports_in_any_order():
    codes = (
        "import lightning_ring, lightning.pytorch" + REGISTERED,
        "import lightning, lightning_ring" + REGISTERED,
        "from lightning_ring.integrations.lightning.strategy import RingStrategy as R; "
        "print(R.strategy_name)",
        "import sys; from lightning_ring import RingStrategy; "
        "print(*(name for name in sys.modules if name.startswith('lightning_ring.')))",
        "import lightning_ring, pytorch_lightning" + OTHER,
        "import pytorch_lightning, lightning_ring" + OTHER,
    )
    done = run([sys.executable, "-c", FORKS, *codes])
    assert done.returncode == 0, done.stdout
    *registered, itself, loaded, ring_first, other_first = done.stdout.split("next\n")[1:]
    names = ["ElasticStrategy", "RingError", "RingFabricStrategy", "RingStrategy", "distribute"]
    assert registered == [f"RingStrategy {names}\n"] * 2
    assert itself == "ring\n"
    # what a rank trains with, and nothing else
    loaded = loaded.split()
    assert "lightning_ring.integrations.lightning.strategy" in loaded
    others = {*("cli", "data", "elastic", "horovod", "launch", "loops", "monitor")}
    others |= {"optim", "tools"}
    assert not {name for name in loaded if name.split(".")[1] in others}
    for path in ("integrations.lightning.elastic", "algorithms.sharded", "algorithms.local"):
        assert f"lightning_ring.{path}" not in loaded
    assert len(loaded) <= 120
    for said in (ring_first, other_first):
        assert (
            "ConfigurationError: Trainer(strategy='ring') of pytorch_lightning was called" in said
        )


@pytest.mark.ranks
def test_importing_the_package_imports_neither_lightning_nor_torch():
    print_names = "print(sorted(sys.modules.keys() & {'lightning', 'torch', 'mpi4py'}))"
    modules = (
        "lightning_ring, lightning_ring.cli.ringrun, lightning_ring.cli.doctor, "
        "lightning_ring.launch.elastic, lightning_ring.elastic.member"
    )
    assert run_code(f"import {modules}, sys; {print_names}") == "[]"


@pytest.mark.ranks
def test_packing_needs_no_torch_and_what_the_data_room_names_is_there():
    code = (
        "import sys, lightning_ring.data.packing.run, lightning_ring.data.shards; "
        "assert 'torch' not in sys.modules; "
        "import lightning_ring.data as d; assert set(d.__all__) <= set(dir(d)); "
        "print(all(getattr(d, name).__name__ == name for name in d.__all__), hasattr(d, 'Nothing'))"
    )
    assert run_code(code) == "True False"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
