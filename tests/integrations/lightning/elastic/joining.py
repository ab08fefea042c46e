"""Jobs in which processes join, and die or stop while they catch up, or while a rank sends to them.

    python -m tests.integrations.lightning.elastic.joining [CASE ...]

Prints a line of JSON for each: what went wrong, where faults were carried out, how many processes
joined.
"""

from __future__ import annotations

import json
import sys

from tests.chaos.plan import Fault, Plan
from tests.chaos.run import run_job

DEATH = Fault(2, 2, "forward", "kill")  # process 3 takes its place, and asks process 1
SHARDED = {
    "the owner of a shard is killed": (DEATH, Fault(1, 0, "feed", "kill")),
    "a newcomer of shards is killed": (DEATH, Fault(3, 0, "catch_up", "kill")),
    "a newcomer of shards is killed in the join": (DEATH, Fault(3, 0, "let_in", "kill")),
    "the owner of a shard is killed in the join": (DEATH, Fault(1, 3, "let_in", "kill")),
}
CASES = {
    "the sender is killed": (DEATH, Fault(1, 0, "feed", "kill")),
    "the sender is stopped": (DEATH, Fault(1, 0, "feed", "stop")),
    "the newcomer is killed": (DEATH, Fault(3, 0, "catch_up", "kill")),
    "the newcomer is stopped": (DEATH, Fault(3, 0, "catch_up", "stop")),
    "both are killed": (DEATH, Fault(1, 0, "feed", "kill"), Fault(3, 0, "catch_up", "kill")),
    "the newcomer is killed when it has caught up": (DEATH, Fault(3, 0, "connect", "kill")),
    "the sender is killed when the newcomer joins": (DEATH, Fault(1, 3, "hand_over", "kill")),
    **SHARDED,
}


def main() -> None:
    for case in sys.argv[1:] or CASES:
        plan = Plan(
            0, 3, backend="gloo", respawns=2, faults=CASES[case], pace=0.2, sharded=case in SHARDED
        )
        result = run_job(plan, mounts=False)
        faults = [fault[2:] for fault in result.faults]
        print(
            json.dumps(
                {"case": case, "wrong": result.wrong, "faults": faults, "joined": result.joined}
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
