"""The large-batch study, on a budget of seconds."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from recipes.data.digits import augmented_digits
from recipes.large_batch import Run, best, study, table
from recipes.record import read
from tests.processes import ROOT, run

SETTINGS = {"epochs": 1, "copies": 1, "base_batch_size": 32}
TINY = [
    "batch_sizes=[128,256]",
    "seeds=[1,2]",
    "workers=1",
    "settings.epochs=3",
    "settings.copies=1",
    "settings.widths=[4]",
]


def method(scaling: str = "none", warmup_epochs: float = 0, label: str = "SGD") -> dict:
    node = {"label": label, "optimizer": {}, "base_lrs": [0.01, 0.1, 1.0]}
    return node | {"scaling": scaling, "warmup_epochs": warmup_epochs}


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
    found = study(compose_study(*TINY), tmp_path)
    header, _, *rows = [line.split(" | ") for line in found.splitlines()]
    assert header == ["| method", "batch 128, 30 steps", "batch 256, 15 steps |"]
    methods = compose_study()["methods"].values()
    assert [row[0] for row in rows] == [f"| {node['label']}" for node in methods]
    assert (tmp_path / "large_batch.md").read_text() == found

    record = tmp_path / "runs.jsonl"
    lines = record.read_bytes().splitlines(keepends=True)
    # killed while it wrote the last but one
    record.write_bytes(b"".join(lines[:-2]) + lines[-2][:20])
    capsys.readouterr()
    assert study(compose_study(*TINY), tmp_path) == found
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
    found = study(compose_study(*few), tmp_path / "one")
    assert (tmp_path / "two" / "large_batch.md").read_text() == found


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
    assert plain.key(SETTINGS | {"epochs": 2}) != plain.key(SETTINGS)


@pytest.mark.parametrize(
    ("scaling", "expected"), [("none", 0.1), ("linear", 3.2), ("sqrt", 0.1 * 32**0.5)]
)
def test_learning_rate_grows_with_the_batch(scaling, expected):
    assert Run(method(scaling), 1024, 0.1, 1, "val").lr(SETTINGS) == pytest.approx(expected)


def test_best_is_by_validation_then_by_loss():
    runs = [Run(method(), 32, lr, 0, "val") for lr in (0.1, 0.2, 0.3)]
    outcomes = [(0.9, 0.5), (0.9, 0.4), (0.0, None)]
    results = [{"accuracy": accuracy, "train_loss": loss} for accuracy, loss in outcomes]
    assert best(runs, results).base_lr == 0.2


def test_table_reads_as_expected():
    chosen = [Run(method(label="A"), size, lr, 0, "test") for size, lr in ((32, 0.1), (64, 1.0))]
    first = [{"steps": 1000, "lr": 0.1, "accuracy": accuracy} for accuracy in (0.9, 0.92)]
    assert table(chosen, [first, [{"steps": 500, "lr": 0.25, "accuracy": 0.8}]]) == (
        "| method | batch 32, 1,000 steps | batch 64, 500 steps |\n"
        "| --- | --- | --- |\n"
        "| A | 91.00 ± 1.41 (0.1) | 80.00 ± 0.00 (0.25*) |\n"
    )
