"""The link between two hosts is cut: two network namespaces with a cable between them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch import ROOT, clean_env, end_session

SCRIPT = str(ROOT / "tests" / "launching" / "rank_script.py")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@contextlib.contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Names of two hosts, at 10.78.0.1 and 10.78.0.2 on their ``eth0``."""
    names = [f"ringtest{os.getpid()}{letter}" for letter in "ab"]
    try:
        try:
            ip("netns", "add", names[0])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        ip("netns", "add", names[1])
        for name in names:
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for number, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def cut_off(host: str) -> None:
    ip("-n", host, "link", "set", "eth0", "down")


@pytest.mark.netns
@pytest.mark.timeout(120)
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2")
def test_both_sides_end_when_the_link_is_cut(tmp_path):
    """Rank 0 waits in a loop that checks, rank 1 in one that nothing can interrupt."""
    with two_hosts() as hosts, contextlib.ExitStack() as cleanup:
        processes = []
        for rank, (host, action) in enumerate(zip(hosts, ("wait", "sleep"), strict=True)):
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            place |= {"MASTER_ADDR": "10.78.0.1", "MASTER_PORT": "29400"}
            process = subprocess.Popen(
                ["ip", "netns", "exec", host, sys.executable, SCRIPT, action, str(tmp_path)],
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
        cut_off(hosts[1])
        outputs = [process.communicate(timeout=30)[0] for process in processes]
    for rank in range(2):
        assert processes[rank].returncode == 1, outputs[rank]
        assert f"rank {1 - rank} (host" in outputs[rank]
        assert "the link to it is cut" in outputs[rank]
