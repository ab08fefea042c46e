"""``lightning-ring timeline``: the ranks' traces as one, and a picture of it."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_ring.cli.arguments import check_output
from lightning_ring.errors import ConfigurationError
from lightning_ring.timeline.trace_files import Merged, merge


def main(arguments: Sequence[str]) -> int:
    """0; 1 where ranks are missing, or a file could not be read or written.

    Raises `ConfigurationError`: the command line is wrong, or there is nothing to merge.
    """
    options = _parser().parse_args(arguments)
    if options.plot:
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigurationError(
                "--plot needs matplotlib, which is not installed: `pip install matplotlib`."
            )
        if options.plot.suffix not in (".png", ".svg", ".pdf"):
            raise ConfigurationError(
                f"--plot {options.plot}: the name of the file must end in .png, .svg or .pdf."
            )
        check_output("--plot", options.plot)
    names = _timelines(options.where)
    if len(names) > 1 and (options.output or options.plot):
        raise ConfigurationError(
            f"{options.where} holds several timelines: {', '.join(name.name for name in names)}. "
            f"Name one of them instead of the folder, such as {names[0]}."
        )
    complete = True
    for name in names:
        try:
            merged = merge(name, options.output)
        except OSError as error:
            print(f"lightning-ring timeline: {error}", file=sys.stderr)
            return 1
        complete = _report(merged) and complete
        if options.plot:
            from lightning_ring.timeline.drawing import plot

            plot(merged.path, options.plot, options.steps)
            print(f"{options.plot}: a picture of it")
    return 0 if complete else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-ring timeline",
        description="Merge what ranks wrote under RingStrategy(timeline='trace.json') or "
        "RING_TIMELINE=trace.json (trace.rank0.jsonl and so on) into one trace for "
        "https://ui.perfetto.dev. A job that ends does this itself; after a crash, or while a "
        "job runs, this does it with what is there.",
    )
    add = parser.add_argument
    add("where", type=Path, metavar="DIR", help="the folder, or the name trace.json in it")
    add("-o", "--output", type=Path, metavar="FILE", help="default: trace.json in DIR")
    add("--plot", type=Path, metavar="FILE", help="also draw some steps (.png, .svg or .pdf)")
    add(
        "--steps",
        type=_steps,
        metavar="A-B",
        help="steps to draw (default: the last two whole ones)",
    )
    return parser


def _steps(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    steps = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if steps[0] > steps[1]:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a step, such as 7, or the first and the last one, such as 7-9"
        )
    return steps


def _timelines(where: Path) -> list[Path]:
    if not where.is_dir():
        return [where]
    stems = {re.sub(r"\.rank\d+$", "", file.stem) for file in where.glob("?*.rank[0-9]*.jsonl")}
    if not stems:
        raise ConfigurationError(
            f"{where} holds no timeline: there is no file such as trace.rank0.jsonl in it. Record "
            "one with RING_TIMELINE=trace.json or RingStrategy(timeline='trace.json')."
        )
    return [where / f"{stem}.json" for stem in sorted(stems)]


def _report(merged: Merged) -> bool:
    print(
        f"{merged.path}: {len(merged.others)} of {merged.world_size} rank(s), {merged.num_events} "
        "events. Open it in https://ui.perfetto.dev"
    )
    for rank, other in merged.others.items():
        clock = other["rank"]["clock"]
        if not clock["shared"]:
            print(f"rank {rank}: its clock is known to ±{clock['error'] * 1e6:.0f} µs")
    problems = []
    if merged.unfinished:
        problems.append(
            f"not closed by rank(s) {_listed(merged.unfinished)}: their job was killed or still "
            "runs, or a copy of a file was cut short"
        )
    if merged.missing:
        problems.append(
            f"missing: rank(s) {_listed(merged.missing)}. Copy "
            f"{merged.path.stem}.rank{merged.missing[0]}.jsonl from that rank's host into this "
            "folder."
        )
    problems += (f"left out: {left_out}" for left_out in merged.left_out)
    for problem in problems:
        print(problem, file=sys.stderr)
    return not merged.missing


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
