"""The study of wires: its table on made-up runs, and a tiny study on real hosts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from benchmarks.hosts import why_not
from recipes.wires.report import cell_of, plot, seconds_until, table
from recipes.wires.run import Method, Run, Settings
from tests import forked
from tests.processes import ROOT, run


def result(method: str, seed: int, curve: list[tuple[float, float]], accuracy: float = 0.9) -> dict:
    about = {"method": method, "rate": "1gbit", "straggler": False, "seed": seed, "steps": 20, "bytes_per_step": 5e5}
    return about | {"curve": curve, "accuracy": accuracy}


def test_time_to_target_is_that_of_the_first_evaluation_that_reaches_it() -> None:
    assert seconds_until([(1.0, 0.5), (2.0, 0.8), (3.0, 0.7), (4.0, 0.9)], 0.7) == 2.0
    assert seconds_until([(1.0, 0.5)], 0.7) == float("inf")


def test_the_table_says_what_was_not_reached(tmp_path: Path) -> None:
    slow = [result("DDP", seed, [(2.0, 0.5), (4.0 + seed, 0.8)]) for seed in range(3)]
    fast = [result("ring", seed, [(1.0, 0.8), (2.0, 0.8)], 0.8 + 0.1 * seed) for seed in range(3)]
    never = [result("lost", seed, [(1.0, 0.5)]) for seed in range(2)] + [result("lost", 2, [(1.0, 0.9)])]
    cells = [cell_of(results, 0.7, 0.11) for results in (slow, fast)] + [cell_of(never, 0.7)]
    rows = [[word.strip() for word in row.split("|")[1:-1]] for row in table(cells, "DDP").splitlines()[2:]]
    assert rows[0] == ["1gbit", "DDP", "5.0", "1.00", "250.0", "110.0 (-56%)", "500", "90.00 ± 0.00"]
    assert rows[1] == ["1gbit", "ring", "1.0", "0.20", "100.0", "110.0 (+10%)", "500", "90.00 ± 10.00"]
    assert rows[2][2:4] == ["not reached", ""]
    plot(cells, "DDP", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000


def test_every_run_of_the_configuration_differs() -> None:
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = OmegaConf.to_container(compose("wires"), resolve=True)
    settings, methods = Settings(**config["settings"]), [Method(**node) for node in config["methods"].values()]
    runs = [Run(method, rate, False, seed) for method in methods for rate in config["rates"] for seed in (1, 2)]
    assert len({each.key(settings) for each in runs}) == len(runs)
    assert config["baseline"] in [method.label for method in methods]


@pytest.mark.netns
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_study_goes_on_where_it_stopped(tmp_path: Path) -> None:
    options = ["rates=[]", "straggler_rates=[200mbit]", "seeds=[1]", "settings.steps=4", "settings.eval_every=2"]
    options += [
        "settings.warmup_steps=1",
        "settings.images=400",
        "settings.hidden=256",
        "target=0.01",
        f"hydra.run.dir={tmp_path}",
    ]
    command = [*forked.python(), str(ROOT / "recipes" / "study_wires.py"), *options]
    first = run([*command, "only=[ddp]"], timeout=100, **forked.ranks())
    assert first.returncode == 0, first.stdout
    again = run([*command, "only=[ddp,fp16]"], timeout=100, **forked.ranks())
    assert again.returncode == 0, again.stdout
    assert "1/1 200mbit, slow rank: ring, fp16, seed 1" in again.stdout
    results = list(map(json.loads, (tmp_path / "runs.jsonl").read_text().splitlines()))
    parameters = 32 * 10 + (32 * 32 + 1) * 256 + 257 * 256 + 4 * 256 + 257 * 100
    measured, *trained = results
    assert measured["profile"]["model"]["num_parameters"] == parameters
    for found, bytes_each in zip(trained, (4, 2), strict=True):
        assert found["bytes_per_step"] == pytest.approx(bytes_each * parameters, rel=0.15)
        assert found["curve"][-1][0] / 4 > 1.5 * found["batch_seconds"]
    assert re.search(r"ring, fp16 .* \d+\.\d \([+-]\d+%\)", (tmp_path / "wires.md").read_text())
    assert (tmp_path / "wires.png").exists()
