"""Sweeps: folders, the table, and what TensorBoard's HParams tab is given."""

import json
import sys

import pytest
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

import recipes.train
from recipes.start import new_folder
from recipes.sweep import read_rows, table
from tests import forked
from tests.processes import ROOT, run

SCRIPT = str(ROOT / "recipes" / "train.py")


def test_runs_of_one_second_get_folders_of_their_own(tmp_path):
    logs = tmp_path / "logs" / "digits"
    assert [new_folder(f"{logs}/run") for _ in range(3)] == [
        f"{logs}/{name}" for name in ("run", "run_2", "run_3")
    ]
    assert (tmp_path / "latest" / "digits").resolve() == logs / "run_3"
    assert len(list(logs.iterdir())) == 3, "TensorBoard would show a link as one more run"
    (tmp_path / "file").touch()
    impossible = f"{tmp_path}/file/digits/run"
    assert new_folder(impossible) == impossible, "Hydra reports the error"


def finished(folder, overrides, metrics):
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


def messages(folder):
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
    assert shown["optimizer/lr"].number_value == 3.0
    assert shown["seed"].number_value == 7
    assert shown["model/network/widths"].string_value == "[16, 32, 64]"
    assert shown["overrides"].string_value == "experiment=debug optimizer=lars seed=7"
    tags = {info.name.tag for info in found["experiment"].metric_infos}
    assert tags == {*metrics, "best/val/loss"}
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
    rows = read_rows(tmp_path)
    assert [(row["folder"], row["status"]) for row in rows] == [
        ("1_optimizer.lr-0.1-trainer.max_epochs-1", "finished"),
        ("0_optimizer.lr--1-trainer.max_epochs-1", "failed"),
    ]
    assert rows[0]["ranks"] == 2
    assert rows[0]["seconds"] > 0
    assert result.stdout.count("| overrides ") == 1
