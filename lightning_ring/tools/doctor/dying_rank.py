"""Process 1 kills itself, and process 0 prints when it knew, and how many ranks go on. Without
torch.
"""

from __future__ import annotations

import os
import signal
import time

from lightning_ring.membership.agreement import Report
from lightning_ring.membership.member import Member

_SECONDS = 20.0


def main() -> None:
    member = Member()
    member.open()
    member.report(Report())
    member.next_view(_SECONDS)
    if member.number == 1:
        print(f"died={time.monotonic():.6f}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    member.is_over(_SECONDS)
    print(f"known={time.monotonic():.6f}", flush=True)
    member.report(Report(1))
    print(f"ranks={len(member.next_view(_SECONDS).members)}", flush=True)
    member.finish()


if __name__ == "__main__":
    main()
