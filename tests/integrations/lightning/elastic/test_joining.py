"""A sender and a newcomer may die while the newcomer catches up: nobody hangs, no step is lost,
all ranks agree.
"""

from __future__ import annotations

import json
import sys

import pytest

from tests.processes import run

CASES = (
    *("the sender is killed", "the newcomer is stopped", "both are killed"),
    *(
        "the owner of a shard is killed",
        "a newcomer of shards is killed",
        "the owner of a shard is killed in the join",
    ),
)


@pytest.mark.ranks
def test_deaths_while_a_process_catches_up_lose_nothing() -> None:
    done = run([sys.executable, "-m", "tests.integrations.lightning.elastic.joining", *CASES])
    assert done.returncode == 0, done.stdout
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    assert [result["wrong"] for result in results] == [[]] * len(CASES)
    assert [sorted(fault[0] for fault in result["faults"]) for result in results] == [
        ["feed", "forward"],
        ["catch_up", "forward"],
        ["catch_up", "feed", "forward"],
        ["feed", "forward"],
        ["catch_up", "forward"],
        ["forward", "let_in"],
    ]
    # a replacement of a newcomer may come too late for its job
    assert any(result["joined"] for result in results)
