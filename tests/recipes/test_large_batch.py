"""The large-batch study, on a budget of seconds."""

import json

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from recipes.data.digits import augmented_digits
from recipes.large_batch import study
from recipes.record import read
from tests.processes import ROOT

TINY = [
    "batch_sizes=[128,256]",
    "seeds=[1]",
    "workers=1",
    "settings.epochs=3",
    "settings.copies=1",
    "settings.widths=[4]",
]


def compose_study(*overrides):
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


def test_a_run_that_diverges_is_recorded_and_never_chosen(tmp_path):
    node = [f"methods.{name}.base_lrs=[1e30,0.01]" for name in ("sgd", "sgd_linear")]
    without = [f"~methods.{name}_warmup" for name in ("sgd", "lars", "lamb")]
    study(compose_study(*TINY, *node, *without), tmp_path)
    results = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    diverged = [result for result in results if result["base_lr"] == 1e30]
    assert diverged
    assert all(result["train_loss"] is None and result["accuracy"] == 0 for result in diverged)
    assert all(result["part"] == "val" for result in diverged)
