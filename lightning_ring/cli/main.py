"""``lightning-ring``: the tools beside training. Each is imported when it is called, so that
``--help`` is instant.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from lightning_ring.errors import RingError
from lightning_ring.host import require_posix

# modules beside this one, with `main(arguments) -> int`, and their purpose
COMMANDS = {
    "doctor": "check the setup: mistakes, and advice",
    "pack": "pack images into shards that train fast, and check them",
    "bench": "how fast the ring is, by backend and size",
    "timeline": "merge the ranks' timelines, also after a crash",
    "plan": "how far a job will scale, and what to change first",
    "report": "one HTML page of a run, or of several compared",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``lightning-ring COMMAND ...``; the exit code is the command's, or 2 where the command
    line was wrong.
    """
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="lightning-ring",
        usage="%(prog)s [-h] COMMAND ...",
        description="Tools beside training. `lightning-ring COMMAND --help` shows the options of "
        "a command.",
        epilog="commands:\n"
        + "\n".join(f"  {name:{width}}  {what}" for name, what in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = parser.parse_args(words[:1]).command
    try:
        require_posix(f"lightning-ring {command}")
        code: int = importlib.import_module(f"lightning_ring.cli.{command}").main(words[1:])
        return code
    except RingError as error:
        print(f"lightning-ring {command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
