"""Sweeps: folders, the table, and TensorBoard's HParams tab in a real browser."""

from __future__ import annotations

import csv
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from playwright.sync_api import Page
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

import recipes.train
from recipes.run_folder import MOST_CHARACTERS, label, new_folder, quoted_path
from recipes.sweep import read_rows, table
from tests import forked
from tests.monitor.browser import NAMES, executable, open_page, open_tensorboard, wait_for
from tests.processes import ROOT, run

SCRIPT = str(ROOT / "recipes" / "train.py")
# elements of a page by their name: custom elements keep their children in shadow roots
ALL = """
function all(name, node = document) {
  const roots = [...node.querySelectorAll('*')].map(one => one.shadowRoot).filter(Boolean);
  return [...node.querySelectorAll(name), ...roots.flatMap(root => all(name, root))];
}
"""
TEST_ACCURACY = 6  # columns before it: the name of the run, and five hyper-parameters


def test_names_fit_a_file_system_and_keep_apart():
    assert label("") == ""
    assert label("optimizer=lars,seed=2") == "_optimizer=lars,seed=2"
    assert label("data.folder=/my images/a:b,+x={y: 1}") == "_data.folder=-my-images-a-b,+x=-y-1-"
    long = [label(f"data.folder={'é' * 400}{end}") for end in "ab"]
    assert long[0] != long[1]
    assert all(len(name.encode()) <= MOST_CHARACTERS + 10 for name in long)


def test_runs_of_one_second_get_folders_of_their_own(tmp_path):
    assert [new_folder(f"{tmp_path}/logs/run") for _ in range(3)] == [
        f"{tmp_path}/logs/{name}" for name in ("run", "run_2", "run_3")
    ]
    (tmp_path / "file").touch()
    assert new_folder(f"{tmp_path}/file/run") == f"{tmp_path}/file/run", "Hydra reports the error"


def test_checkpoints_below_such_a_folder_can_be_named_as_they_are():
    assert (
        quoted_path("ckpt_path=logs/0_seed=1,lr=2/last.ckpt")
        == "ckpt_path='logs/0_seed=1,lr=2/last.ckpt'"
    )
    for unchanged in ("ckpt_path='a=1'", "ckpt_path=a,b", "ckpt_path=null", "seed=1", "-m"):
        assert quoted_path(unchanged) == unchanged


def finished(folder: Path, overrides: list[str], metrics: dict[str, float] | None) -> None:
    (folder / ".hydra").mkdir(parents=True)
    OmegaConf.save(OmegaConf.create(overrides), folder / ".hydra" / "overrides.yaml")
    if metrics is not None:
        (folder / "result.json").write_text(
            json.dumps({"ranks": 2, "seconds": 61.24, "metrics": metrics})
        )


def test_table_has_the_best_run_first_and_says_what_failed(tmp_path):
    common = "trainer.max_epochs=1"
    finished(tmp_path / "0", ["seed=1", common], None)
    finished(tmp_path / "1", ["seed=2", common], {"test/accuracy": 0.5})
    finished(tmp_path / "2", ["seed=3", common], {"test/accuracy": 0.75})
    rows = read_rows(tmp_path)
    assert [row["folder"] for row in rows] == ["2", "1", "0"]
    assert table(rows).splitlines() == [
        "| overrides | test/accuracy | time   |",
        "| ---       | ---:          | ---:   |",
        "| seed=3    | 0.7500        | 61.2 s |",
        "| seed=2    | 0.5000        | 61.2 s |",
        "| seed=1    | failed        |        |",
    ]
    finished(tmp_path / "3", ["seed=4", common], {"test/accuracy": 0.1, "test/R@1": 0.9})
    assert read_rows(tmp_path)[0]["folder"] == "3", "retrieval is judged by R@1"


def messages(folder: Path) -> dict[str, Any]:
    events = EventAccumulator(str(folder)).Reload()
    found = {}
    for tag in ("session_start_info", "experiment"):
        data = plugin_data_pb2.HParamsPluginData()
        data.ParseFromString(events.SummaryMetadata(f"_hparams_/{tag}").plugin_data.content)
        found[tag] = getattr(data, tag)
    return found


def test_a_run_logs_its_whole_configuration_and_what_the_test_found(composed, tmp_path):
    metrics = recipes.train.train(composed("experiment=debug", "optimizer=lars", "seed=7"))
    found = messages(tmp_path)
    shown = found["session_start_info"].hparams
    assert shown["optimizer"].string_value == "lars"
    assert shown["optimizer.lr"].number_value == 3.0
    assert shown["seed"].number_value == 7
    assert shown["model.network.widths"].string_value == "[16, 32, 64]"
    assert shown["overrides"].string_value == "experiment=debug optimizer=lars seed=7"
    assert shown["optimizer._partial_"].bool_value is True
    columns = {info.name: info for info in found["experiment"].hparam_infos}
    assert set(shown) < set(columns)
    assert "optimizer.nesterov" in columns, "another run's, with sgd"
    tags = [info.name.tag for info in found["experiment"].metric_infos]
    assert tags[0] == "test/accuracy"
    assert set(tags) == {*metrics, "best/val/loss"}
    scalars = EventAccumulator(str(tmp_path)).Reload()
    assert "hp_metric" not in scalars.Tags()["scalars"]
    assert scalars.Scalars("test/accuracy")[-1].value == pytest.approx(metrics["test/accuracy"])


@pytest.mark.ranks
def test_a_run_that_fails_is_a_row_and_the_others_go_on(tmp_path):
    """On two ranks, which this process starts; it is the one that goes on and writes the table."""
    options = ["trainer.max_epochs=1", "optimizer.lr=-1,0.1", f"hydra.sweep.dir={tmp_path}"]
    result = run([sys.executable, SCRIPT, "-m", *options], **forked.ranks())
    assert result.returncode == 1, result.stdout
    assert "Invalid learning rate: -1" in result.stdout
    assert "Runs of the sweep that failed: 1" in result.stdout
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["folder"], row["status"]) for row in rows] == [
        ("1_optimizer.lr=0.1,trainer.max_epochs=1", "finished"),
        ("0_optimizer.lr=-1,trainer.max_epochs=1", "failed"),
    ]
    assert rows[0]["ranks"] == "2"
    assert float(rows[0]["seconds"]) > 0
    assert result.stdout.count("| overrides ") == 1


@pytest.mark.ranks
@pytest.mark.skipif(executable() is None, reason=f"none of {', '.join(NAMES)} is installed")
def test_two_optimizers_and_two_seeds_in_a_browser(tmp_path):
    """The table in the terminal, the CSV and the tab, once it is sorted by accuracy, name the
    runs in one order.
    """
    sweep = tmp_path / "sweep"
    options = [
        "experiment=debug",
        "trainer.limit_train_batches=12",
        "optimizer=sgd,lars",
        "seed=1,2",
    ]
    result = run(
        [sys.executable, SCRIPT, "-m", *options, f"hydra.sweep.dir={sweep}"], **forked.ranks()
    )
    assert result.returncode == 0, result.stdout
    with (sweep / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    best_first = [row["folder"] for row in rows]
    assert sorted(best_first) == [
        f"{number}_optimizer={optimizer},seed={seed},trainer.limit_train_batches=12"
        for number, (optimizer, seed) in enumerate(
            [("sgd", 1), ("sgd", 2), ("lars", 1), ("lars", 2)]
        )
    ]
    accuracies = [float(row["test/accuracy"]) for row in rows]
    assert accuracies == sorted(accuracies, reverse=True)
    with open_tensorboard(sweep) as address, open_page(2200, 900) as page:
        page.goto(f"{address}#hparams")
        wait_for(page, "best/val/loss", *best_first)
        for order, expected in (("Ascending", best_first[::-1]), ("Descending", best_first)):
            trials = sorted_by(page, "test/accuracy", order)
            assert [row[0] for row in trials] == expected
        shown = [float(row[TEST_ACCURACY]) for row in trials]
        assert shown == pytest.approx(accuracies, abs=1e-4)


def sorted_by(page: Page, column: str, order: str) -> list[list[str]]:
    """Choose it in the menus "Sort by" and "Direction", and read the rows as they are seen, from
    top to bottom.
    """
    for item in (column, order):
        page.evaluate(
            f"{{ {ALL} all('paper-item').find(one => one.textContent.trim() === "
            f"'{item}').click() }}"
        )
        time.sleep(1)  # the page asks the server
    cells = page.evaluate(f"""{{ {ALL}
        all('vaadin-grid-cell-content').map(cell => {{
          const place = cell.getBoundingClientRect();
          return [Math.round(place.y), place.x, cell.textContent.trim()];
        }}).filter(([y, x, text]) => text) }}""")
    lines: dict[int, list[tuple[float, str]]] = {}
    for y, x, text in cells:
        lines.setdefault(y, []).append((x, text))
    rows = [[text for _, text in sorted(line)] for _, line in sorted(lines.items())]
    return [row for row in rows if "optimizer=" in row[0]]  # without the heads
