"""Repeats an experiment on 1, 2 and 4 devices and tells how much faster it gets: `python recipes/scaling.py -h`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from lightning_ring.host.cores import available_cores

TRAIN = Path(__file__).resolve().parent / "train.py"
RESULT = "result.json"
PUBLISHED = "experiment=mnist_resnet50"
PUBLISHED_MINUTES = {1: 78, 4: 23}
"""ResNet-50 on MNIST, 100 epochs, by number of GPUs: the WeChat team's figures."""


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
    runs = [train_on(devices, folder, options) for devices in sorted(set(options.devices))]
    text = table(runs, published=overrides(options) == [PUBLISHED]) + "\n"
    (folder / "scaling.md").write_text(text)
    print(f"\n{text}\n{folder / 'scaling.md'}")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Repeats an experiment on 1, 2 and 4 devices and prints time, speed-up and efficiency, for "
        "ResNet-50 on MNIST beside those that were published. The batch of a step over all devices stays the same, so "
        "that all runs take the same steps."
    )
    parser.add_argument("overrides", nargs="*", help="for recipes/train.py; experiment=mnist_resnet50 by default")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    parser.add_argument("--target", type=float, help="end each run when --monitor has reached this: time to accuracy")
    parser.add_argument("--monitor", default="val/accuracy", help="a metric of validation (default: val/accuracy)")
    parser.add_argument("--folder", help="for logs and the table (default: logs/scaling/DATE_TIME)")
    return parser


def overrides(options: argparse.Namespace) -> list[str]:
    return options.overrides or [PUBLISHED]


def train_on(devices: int, folder: Path, options: argparse.Namespace) -> Run:
    """Run recipes/train.py in a process of its own; its output is shown.

    Raises:
        SystemExit: It failed.
    """
    own = folder / f"devices_{devices}"
    command = [sys.executable, str(TRAIN), *overrides(options), f"trainer.devices={devices}", f"hydra.run.dir={own}"]
    if options.target is not None:
        stop = "+callbacks.target"
        command += [
            f"{stop}._target_=lightning.pytorch.callbacks.EarlyStopping",
            f"{stop}.monitor={options.monitor}",
            f"{stop}.mode=max",
            f"{stop}.stopping_threshold={options.target}",
            f"{stop}.patience=1000000",  # validations without a better value: only the target ends the run
        ]
    print(f"--- {devices} device(s)", flush=True)
    code = subprocess.run(command, check=False).returncode
    if code:
        raise SystemExit(f"The run on {devices} device(s) failed with exit code {code}. Its command: {command}")
    result = json.loads((own / RESULT).read_text())
    if result["ranks"] != devices:
        raise SystemExit(
            f"The run on {devices} device(s) had {result['ranks']} rank(s): start this without a launcher."
        )
    return Run(devices, result["epochs"], result["steps"], result["seconds"], result["metrics"])


def table(runs: list[Run], published: bool = False) -> str:
    """Markdown: a line for each run, compared with the first, and if ``published`` with `PUBLISHED_MINUTES`."""
    first = runs[0]
    shown = [name for name in ("test/accuracy", "test/R@1", "test_unseen/R@1") if name in first.metrics]
    published_first = PUBLISHED_MINUTES[min(PUBLISHED_MINUTES)]
    header = [
        "devices",
        "epochs",
        "steps",
        "time",
        "speed-up",
        "efficiency",
        *shown,
        *["published: time, speed-up"] * published,
    ]
    lines = [header, ["---"] * len(header)]
    for run in runs:
        speed_up = first.seconds / run.seconds
        minutes = PUBLISHED_MINUTES.get(run.devices)
        lines.append(
            [
                str(run.devices),
                str(run.epochs),
                str(run.steps),
                f"{run.seconds:.1f} s" if run.seconds < 600 else f"{run.seconds / 60:.1f} min",
                f"{speed_up:.2f}",
                f"{100 * speed_up * first.devices / run.devices:.0f} %",
                *(f"{run.metrics[name]:.4f}" for name in shown),
                *[f"{minutes} min, {published_first / minutes:.2f}" if minutes else ""] * published,
            ]
        )
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    cores = available_cores()
    if max(run.devices for run in runs) > cores:
        rows += ["", f"On the CPU these ranks share {cores} cores: more ranks than cores cannot be faster."]
    return "\n".join(rows)


if __name__ == "__main__":
    main()
