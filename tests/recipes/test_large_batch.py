"""The large-batch study, on a budget of seconds."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from recipes.data.scans import augmented_digits
from recipes.large_batch import Cell, Method, Run, Settings, best, study, table
from recipes.record import read
from tests.processes import ROOT, run

SETTINGS = Settings(epochs=1, copies=1, base_batch_size=32, weight_decay=0.0, widths=(4, 4))
SGD = {"_target_": "torch.optim.SGD", "_partial_": True}
TINY = [
    "batch_sizes=[128,256]",
    "seeds=[1,2]",
    "workers=1",
    "settings.epochs=3",
    "settings.copies=1",
    "settings.widths=[4]",
]


def method(scaling: str = "none", warmup_epochs: float = 0) -> Method:
    return Method("SGD", SGD, scaling, warmup_epochs, (0.01, 0.1))


def compose_study(*overrides: str) -> dict:
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return OmegaConf.to_container(
            compose("large_batch", overrides=list(overrides)), resolve=True
        )


def test_images_are_some_twenty_thousand_and_always_the_same():
    config = compose_study()
    parts = augmented_digits(config["settings"]["copies"])
    assert 19_000 <= len(parts["train"].labels) <= 22_000
    again = augmented_digits(config["settings"]["copies"])
    assert all(torch.equal(parts[name].images, again[name].images) for name in parts)
    for part in parts.values():
        assert part.images.shape == (len(part.labels), 1, 8, 8)
        assert 0 <= part.images.min() <= part.images.max() <= 1
    once = augmented_digits(1)
    assert sum(len(part.labels) for part in once.values()) == 1797


def test_every_method_has_the_same_budget():
    config = compose_study()
    assert len({len(node["base_lrs"]) for node in config["methods"].values()}) == 1
    sizes = config["batch_sizes"]
    assert [size // sizes[0] for size in sizes] == [1, 8, 16, 32]
    assert len(config["seeds"]) >= 3
    assert config["tuning_seed"] not in config["seeds"]


@pytest.mark.ranks
def test_whole_study_writes_its_report_and_goes_on_where_it_stopped(tmp_path, capsys):
    cells = study(compose_study(*TINY), tmp_path)
    assert [(cell.method, cell.batch_size) for cell in cells] == [
        (label, size)
        for label in (node["label"] for node in compose_study()["methods"].values())
        for size in (128, 256)
    ]
    assert all(len(cell.accuracies) == 2 for cell in cells)
    assert {cell.batch_size: cell.steps for cell in cells} == {
        128: 1295 // 128 * 3,
        256: 1295 // 256 * 3,
    }
    assert (tmp_path / "large_batch.md").read_text() == table(cells)

    record = tmp_path / "runs.jsonl"
    lines = record.read_bytes().splitlines(keepends=True)
    # killed while it wrote the last but one
    record.write_bytes(b"".join(lines[:-2]) + lines[-2][:20])
    capsys.readouterr()
    assert study(compose_study(*TINY), tmp_path) == cells
    assert capsys.readouterr().out.count("accuracy") == 2
    assert len(read(record)) == len(lines)


@pytest.mark.ranks
def test_processes_give_what_one_gives(tmp_path):
    """Through the command line: spawned workers must find the code, and results may not depend
    on who computed them.
    """
    few = [
        *TINY,
        "batch_sizes=[256]",
        "~methods.sgd_linear",
        "~methods.lars_warmup",
        "~methods.lamb_warmup",
    ]
    arguments = [*few, "hydra.run.dir=" + str(tmp_path / "two"), "workers=2"]
    result = run([sys.executable, str(ROOT / "recipes" / "large_batch.py"), *arguments])
    assert result.returncode == 0, result.stdout
    (tmp_path / "one").mkdir()
    cells = study(compose_study(*few), tmp_path / "one")
    assert (tmp_path / "two" / "large_batch.md").read_text() == table(cells)


def test_a_run_that_diverges_is_recorded_and_never_chosen(tmp_path):
    node = [f"methods.{name}.base_lrs=[1e30,0.01]" for name in ("sgd", "sgd_linear")]
    without = [f"~methods.{name}_warmup" for name in ("sgd", "lars", "lamb")]
    study(compose_study(*TINY, *node, *without), tmp_path)
    results = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    diverged = [result for result in results if result["base_lr"] == 1e30]
    assert diverged
    assert all(result["train_loss"] is None and result["accuracy"] == 0 for result in diverged)
    assert all(result["part"] == "val" for result in diverged)


def test_runs_that_would_do_the_same_are_one():
    plain = Run(method("none"), 32, 0.1, 1, "val")
    assert plain.key(SETTINGS) == replace(plain, method=method("linear")).key(SETTINGS)
    for other in (
        replace(plain, method=method("none", warmup_epochs=1)),
        replace(plain, base_lr=0.2),
        replace(plain, seed=2),
        replace(plain, part="test"),
        replace(plain, batch_size=64),
    ):
        assert other.key(SETTINGS) != plain.key(SETTINGS)
    assert plain.key(replace(SETTINGS, epochs=2)) != plain.key(SETTINGS)


@pytest.mark.parametrize(
    ("scaling", "expected"), [("none", 0.1), ("linear", 3.2), ("sqrt", 0.1 * 32**0.5)]
)
def test_learning_rate_grows_with_the_batch(scaling, expected):
    assert Run(method(scaling), 1024, 0.1, 1, "val").lr(SETTINGS) == pytest.approx(expected)


def test_best_is_by_validation_then_by_loss():
    runs = [Run(method(), 32, lr, 0, "val") for lr in (0.1, 0.2, 0.3)]
    outcomes = [(0.9, 0.5), (0.9, 0.4), (0.0, None)]
    results = {
        run.key(SETTINGS): {"accuracy": accuracy, "train_loss": loss}
        for run, (accuracy, loss) in zip(runs, outcomes, strict=True)
    }
    assert best(runs, SETTINGS, results).base_lr == 0.2


def test_table_reads_as_expected():
    cells = [Cell("A", 32, 1000, 0.1, False, (0.9, 0.92)), Cell("A", 64, 500, 0.25, True, (0.8,))]
    assert table(cells) == (
        "| method | batch 32, 1,000 steps | batch 64, 500 steps |\n"
        "| --- | --- | --- |\n"
        "| A | 91.00 ± 1.41 (0.1) | 80.00 ± 0.00 (0.25*) |\n"
    )


def test_folder_is_the_same_for_every_start():
    assert "${now:" not in Path(ROOT / "configs" / "large_batch.yaml").read_text()
