"""A forked rank ends, is signalled and is started as a process of its own is."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.processes import assert_gone, clean_env, end_session, run

pytestmark = pytest.mark.ranks
SLEEPS = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(60)"


@pytest.mark.parametrize(
    ("code", "returncode"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit('why')", 1),
        ("raise ValueError('why')", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("raise KeyboardInterrupt", -2),
        ("import atexit; atexit.register(print, 'why'); raise SystemExit(4)", 4),
    ],
)
def test_it_ends_as_python_does(code: str, returncode: int) -> None:
    plain, rank = (run([*python, "-c", code]) for python in ([sys.executable], forked.python()))
    assert plain.returncode == rank.returncode == returncode
    assert plain.stdout.splitlines()[-1:] == rank.stdout.splitlines()[-1:]


def test_its_libraries_are_there_and_this_package_is_not() -> None:
    code = (
        "import sys; print('lightning' in sys.modules, 'lightning_ring' in sys.modules, sys.argv)"
    )
    assert run([*forked.python(), "-c", code, "a"]).stdout == "True False ['-c', 'a']\n"


def test_another_environment_at_the_start_is_heeded() -> None:
    code = "import sys; print('lightning' in sys.modules)"
    assert run([*forked.python(), "-c", code], OMP_NUM_THREADS="2").stdout == "False\n"


def test_options_for_warnings_are_heeded() -> None:
    code = "import warnings; warnings.warn('why', FutureWarning)"
    done = run([*forked.python(), "-B", "-W", "error::FutureWarning", "-c", code])
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "FutureWarning: why"


def test_ranks_that_a_launcher_starts_are_forked_and_what_they_start_is_not(tmp_path: Path) -> None:
    """Also rank 0, which inherits the socket of the launcher."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, subprocess, sys\nif 'RING_RANK' in os.environ and not sys.argv[1:]:\n    "
        "before = 'lightning' in sys.modules\n    import torch, lightning_ring\n    with "
        "lightning_ring.distribute(torch.nn.Linear(1, 1)) as training:\n        total = "
        "int(training.all_reduce(torch.ones(1), 'sum'))\n    child = "
        "subprocess.run([sys.executable, __file__, 'child'], capture_output=True, "
        "text=True).stdout\n    print(before, total, child)\nprint('lightning' in sys.modules, "
        "sys.argv[1:])\n"
    )
    ringrun = [
        sys.executable,
        "-m",
        "lightning_ring.cli.ringrun",
        "--no-mpi",
        "-n",
        "2",
        str(script),
    ]
    done = run(ringrun, **forked.ranks())
    assert done.stdout.count("True 2 False") == 2, done.stdout
    assert run([sys.executable, str(script)], **forked.ranks()).stdout == "False []\n"


def test_lines_of_several_ranks_stay_whole(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("for _ in range(2000): print('a', 'b', 'c')\n")
    command = [*forked.python(), str(script)]
    both = ["sh", "-c", '"$@" & "$@"; wait', "sh", *command]
    assert set(run(both).stdout.splitlines()) == {"a b c"}


def test_a_script_is_found_beside_its_modules(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    script = tmp_path / "script.py"
    script.write_text(
        "import beside, pickle\nclass C: "
        "pass\npickle.dumps(C())\nprint(beside.WORD, __name__, __file__)"
    )
    assert run([*forked.python(), str(script)]).stdout == f"found __main__ {script}\n"


@pytest.mark.parametrize("ended", ["by SIGTERM", "with its small process", "with its session"])
def test_no_rank_outlives_its_small_process(ended: str) -> None:
    process = subprocess.Popen(
        [*forked.python(), "-c", SLEEPS],
        env=clean_env(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert pid != process.pid
    if ended == "by SIGTERM":
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
    elif ended == "with its session":
        end_session(process)
    else:
        process.kill()
    process.wait(60)
    assert_gone([pid])


def test_every_second_rank_has_other_hashes() -> None:
    hashes = {
        run([*forked.python(), "-c", "print(hash('a'))"], RING_RANK=str(rank)).stdout
        for rank in range(4)
    }
    assert len(hashes) == 2
