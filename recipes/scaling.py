"""Repeats an experiment on 1, 2 and 4 devices and tells how much faster it gets: `python
recipes/scaling.py -h`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_ring.host.cores import available_cores

TRAIN = Path(__file__).resolve().parent / "train.py"
RESULT = "result.json"
DEFAULT = "experiment=mnist_resnet50"
FEWEST_REPEATS = 3
WIDEST_SPREAD = 0.1  # of the median: runs that differ by more than this support no ratio


@dataclass(frozen=True, slots=True)
class Run:
    """One run: ``seconds`` from the start of fit to its end, and what the test found."""

    devices: int
    epochs: int
    steps: int
    seconds: float
    metrics: dict[str, float]


def main() -> None:
    options = parser().parse_intermixed_args()
    folder = Path(options.folder or f"logs/scaling/{time.strftime('%Y-%m-%d_%H-%M-%S')}")
    devices = sorted(set(options.devices))
    timer = "+callbacks.warm_up"  # not fewer epochs: a schedule may be longer than they are
    warm_up = [
        f"{timer}._target_=lightning.pytorch.callbacks.Timer",
        f"{timer}.duration='00:00:00:10'",
    ]
    # compiles, and reads all files once; not counted
    train_on(devices[-1], folder / "warm_up", options, warm_up)
    runs = [
        train_on(number, folder / f"devices_{number}_run_{turn}", options)
        for turn in range(1, options.repeats + 1)
        for number in devices  # in turns, so that what else the machine does falls on all alike
    ]
    text = table(runs) + "\n"
    (folder / "scaling.md").write_text(text)
    print(f"\n{text}\n{folder / 'scaling.md'}")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Repeats an experiment on 1, 2 and 4 devices and prints time, speed-up and "
        "efficiency. After a warm-up of 10 seconds each number of devices is run --repeats times, "
        "in turns; times are medians with the lowest and the highest. A speed-up that they do not "
        "support is left out, and the reason is given. The batch of a step over all devices stays "
        "the same, so that all runs take the same steps."
    )
    parser.add_argument("overrides", nargs="*", help=f"for recipes/train.py; {DEFAULT} by default")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    parser.add_argument(
        "--repeats", type=int, default=FEWEST_REPEATS, metavar="N", help="runs of each (default: 3)"
    )
    parser.add_argument(
        "--target",
        type=float,
        help="end each run when --monitor has reached this: time to accuracy",
    )
    parser.add_argument(
        "--monitor", default="val/accuracy", help="a metric of validation (default: val/accuracy)"
    )
    parser.add_argument("--folder", help="for logs and the table (default: logs/scaling/DATE_TIME)")
    return parser


def overrides(options: argparse.Namespace) -> list[str]:
    return options.overrides or [DEFAULT]


def train_on(devices: int, own: Path, options: argparse.Namespace, more: Sequence[str] = ()) -> Run:
    """Run recipes/train.py in a process of its own, with the folder ``own``; its output is shown.

    Raises:
        SystemExit: It failed.
    """
    command = [
        sys.executable,
        str(TRAIN),
        *overrides(options),
        f"trainer.devices={devices}",
        f"hydra.run.dir={own}",
        *more,
    ]
    if options.target is not None:
        stop = "+callbacks.target"
        command += [
            f"{stop}._target_=lightning.pytorch.callbacks.EarlyStopping",
            f"{stop}.monitor={options.monitor}",
            f"{stop}.mode=max",
            f"{stop}.stopping_threshold={options.target}",
            # validations without a better value: only the target ends the run
            f"{stop}.patience=1000000",
        ]
    print(f"--- {devices} device(s)", flush=True)
    code = subprocess.run(command, check=False).returncode
    if code:
        raise SystemExit(
            f"The run on {devices} device(s) failed with exit code {code}. Its command: {command}"
        )
    result = json.loads((own / RESULT).read_text())
    if result["ranks"] != devices:
        raise SystemExit(
            f"The run on {devices} device(s) had {result['ranks']} rank(s): start this without a "
            "launcher."
        )
    return Run(devices, result["epochs"], result["steps"], result["seconds"], result["metrics"])


def table(runs: list[Run]) -> str:
    """Markdown: a line for each number of devices, compared with the first. Below it, why ratios
    are missing.
    """
    by_devices: dict[int, list[Run]] = {}
    for run in runs:
        by_devices.setdefault(run.devices, []).append(run)
    first = next(iter(by_devices.values()))
    shown = [
        name
        for name in ("test/accuracy", "test/R@1", "test_unseen/R@1")
        if name in first[0].metrics
    ]
    header = ["devices", "runs", "epochs", "steps", "time", "speed-up", "efficiency", *shown]
    lines, reasons = [header, ["---"] * len(header)], []
    for devices, of in by_devices.items():
        reason = why_no_ratio(first, of)
        if reason and reason not in reasons:
            reasons.append(reason)
        share = first[0].devices / devices
        lines.append(
            [
                str(devices),
                str(len(of)),
                spread([run.epochs for run in of]),
                spread([run.steps for run in of]),
                times([run.seconds for run in of]),
                "-" if reason else ratio(first, of, "{:.2f}"),
                "-" if reason else ratio(first, of, "{:.0f} %", 100 * share),
                *(f"{statistics.median(run.metrics[name] for run in of):.4f}" for name in shown),
            ]
        )
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    rows += [f"\nNo speed-up: {reason}." for reason in reasons]
    cores = available_cores()
    if max(by_devices) > cores:
        rows += [
            "",
            f"On the CPU these ranks share {cores} cores: more ranks than cores cannot be faster.",
        ]
    return "\n".join(rows)


def why_no_ratio(first: list[Run], of: list[Run]) -> str:
    """Why the times of these runs support no ratio; empty if they do."""
    if min(len(first), len(of)) < FEWEST_REPEATS:
        return (
            f"it takes {FEWEST_REPEATS} runs of each number of devices to tell it from chance "
            "(--repeats)"
        )
    for runs in (first, of):
        seconds = [run.seconds for run in runs]
        width = (max(seconds) - min(seconds)) / statistics.median(seconds)
        if width > WIDEST_SPREAD:
            return (
                f"the runs on {runs[0].devices} device(s) differ by {100 * width:.0f} %, more than "
                f"{100 * WIDEST_SPREAD:.0f} %. Let nothing else run, or train longer"
            )
    return ""


def ratio(first: list[Run], of: list[Run], form: str, factor: float = 1.0) -> str:
    """By which the median run is faster, and in brackets the least and the most that any two
    runs show.
    """
    before, after = ([run.seconds for run in runs] for runs in (first, of))
    middle = statistics.median(before) / statistics.median(after)
    low, high = (
        form.format(factor * value)
        for value in (min(before) / max(after), max(before) / min(after))
    )
    return (
        f"{form.format(factor * middle)} ({low} to {high})"
        if first is not of
        else form.format(factor * middle)
    )


def times(seconds: list[float]) -> str:
    unit, name = (1, "s") if statistics.median(seconds) < 600 else (60, "min")
    return f"{spread([round(value / unit, 1) for value in seconds])} {name}"


def spread(values: Sequence[float]) -> str:
    """The median, and in brackets the lowest and the highest where they differ."""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:g}" if low == high else f"{middle:g} ({low:g} to {high:g})"


if __name__ == "__main__":
    main()
