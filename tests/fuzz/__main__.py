"""Random programs under one process, DDP, `ring` and `ring_sharded`, compared.

python -m tests.fuzz --seeds 0:1000          # counts, and every seed that does not agree
python -m tests.fuzz --seed 123 --show       # its script, to run by hand under torchrun
"""

import argparse
import signal
import sys

from tests.fuzz.program import draw
from tests.fuzz.session import Session


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--seeds", default="0:100", help="FIRST:LAST (LAST not included), or numbers with commas"
    )
    parser.add_argument("--seed", type=int)
    parser.add_argument("--show", action="store_true", help="print the script of --seed and end")
    parser.add_argument(
        "--limit", type=float, default=60.0, help="seconds for one program under one strategy"
    )
    arguments = parser.parse_args()
    if arguments.show:
        print(draw(arguments.seed or 0).script())
        return 0
    signal.signal(signal.SIGTERM, _end)
    with Session(arguments.limit) as session:
        seeds = [arguments.seed] if arguments.seed is not None else _seeds(arguments.seeds)
        failures = session.compare(seeds)
    return 1 if failures else 0


def _end(number, frame):
    """End with the clean-up of `Session`, once: `timeout` sends its signal twice."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _seeds(text):
    if ":" in text:
        first, last = text.split(":")
        return list(range(int(first), int(last)))
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
