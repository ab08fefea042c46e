"""``lightning-ring report``: one HTML page of a run, or of several compared."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from lightning_ring.cli.arguments import check_output
from lightning_ring.errors import ConfigurationError


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lightning-ring report",
        description="Write one HTML page, which needs no network, of what a run logged to "
        "TensorBoard: result, curves, where a step's time goes, ranks, pictures, configuration, "
        "environment. Several runs are compared.",
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="folder of a run, or above several")
    add("-o", "--output", default="report.html", metavar="FILE", help="default: report.html")
    add("--metric", metavar="TAG", help="scalar to compare by (default: that of checkpoints)")
    options = parser.parse_args(arguments)
    needed = ("tensorboard", "jinja2", "yaml", "matplotlib")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"the report needs {' and '.join(missing)}, which this Python does not have: "
            "`pip install 'lightning-ring[monitor]'` brings it."
        )
    output = Path(options.output)
    check_output("-o", output)
    from lightning_ring.tools.report import write_page
    from lightning_ring.tools.report.runs import read_runs

    runs = read_runs(options.runs)
    page = write_page(runs, options.metric).encode()
    output.write_bytes(page)
    counted = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    print(f"{output}: {counted}, {len(page) / 1e6:.1f} MB")
    return 0
