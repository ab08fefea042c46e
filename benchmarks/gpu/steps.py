"""What the reducer costs beside DDP's on one GPU: ResNet-50, bf16-mixed, channels-last.

A ring of one rank leaves its collectives out, so that only the forced one is compared with DDP,
whose reducer always runs. At a batch of 256 the GPU is the limit; at a batch of 8 small images the
host is, and the time of a step is what the host needs for one.
"""

from __future__ import annotations

import argparse
import json
import statistics

from benchmarks.step import compare

# with it alone would come the monitor, which is no collective
FORCED = "force_communication=True,monitor=False"
CONTENDERS = ("ddp", f"ring:{FORCED}", f"ring_sharded:{FORCED}", "ring", "auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    model = "tiny" if asked.tiny else "resnet50"
    limit = () if asked.tiny else ((CONTENDERS[1], "ddp", 1.01),)
    options = ["--device", asked.device]
    rows = (
        {"tiny": []}
        if asked.tiny
        else {"batch 256": ["--batch", "256"], "batch 8": ["--batch", "8", "--image", "64"]}
    )
    if not asked.tiny:
        options += ["--precision", "bf16-mixed", "--channels-last"]
    for name, more in rows.items():
        row = compare.Row(
            model,
            CONTENDERS,
            limit,
            ranks=1,
            steps=2 if asked.tiny else 10,
            rounds=1 if asked.tiny else 6,
            start="exec" if asked.device == "cuda" else "fork",
            by_turn=True,
        )
        seconds, facts = compare.measure(row, [*options, *more])
        print(*compare.report(row, seconds, facts), sep="\n", flush=True)
        for contender, times in seconds.items():
            ratio, low, high = compare.ratio_of_turns(times, seconds["ddp"], row.steps)
            told = {"row": name, "contender": contender, "ms": 1e3 * statistics.median(times)}
            print(json.dumps(told | {"of_ddp": ratio, "low": low, "high": high}), flush=True)


if __name__ == "__main__":
    main()
