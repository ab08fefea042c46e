"""The link between two hosts is cut: two hosts, each a network namespace."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.hosts import open_hosts, why_not
from tests.launch import ROOT, clean_env, end_session

SCRIPT = str(ROOT / "tests" / "launching" / "rank_script.py")


@pytest.mark.netns
@pytest.mark.timeout(120)
def test_both_sides_end_when_the_link_is_cut(tmp_path):
    """Rank 0 waits in a loop that checks, rank 1 in one that nothing can interrupt."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with open_hosts(2, rate=None) as hosts, contextlib.ExitStack() as cleanup:
        processes = []
        for rank, (host, action) in enumerate(zip(hosts.names, ("wait", "sleep"), strict=True)):
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            place |= {"MASTER_ADDR": hosts.address(hosts.names[0]), "MASTER_PORT": "29400"}
            process = subprocess.Popen(
                hosts.on(host, sys.executable, SCRIPT, action, str(tmp_path)),
                env=clean_env(**place),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            cleanup.callback(process.communicate, timeout=20)
            cleanup.callback(end_session, process)
            processes.append(process)
        deadline = time.monotonic() + 60
        while not all(Path(tmp_path, f"pid.{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline, "the ranks did not come up"
            time.sleep(0.1)
        time.sleep(1)
        hosts.cut(hosts.names[1])
        outputs = [process.communicate(timeout=30)[0] for process in processes]
    for rank in range(2):
        assert processes[rank].returncode == 1, outputs[rank]
        assert f"rank {1 - rank} (host" in outputs[rank]
        assert "the link to it is cut" in outputs[rank]
