"""The study of wires: its table on made-up runs, and a tiny study on real hosts."""

import json
import re

import pytest
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from benchmarks.wires.rank import StepsOfAll
from benchmarks.wires.study import (
    Method,
    bits_per_second,
    cells_on_record,
    seconds_until,
    tables,
)
from tests import forked
from tests.hosts import why_not
from tests.processes import ROOT, run, wait_for


def test_time_to_target_is_that_of_the_first_evaluation_that_reaches_it():
    assert seconds_until([(1.0, 0.5), (2.0, 0.8), (3.0, 0.7), (4.0, 0.9)], 0.7) == 2.0
    assert seconds_until([(1.0, 0.5)], 0.7) == float("inf")


def test_rates_are_read_as_tc_does():
    assert [bits_per_second(rate) for rate in ("8bit", "100mbit", "1.5gbit")] == [8, 1e8, 1.5e9]


def test_the_published_runs_are_those_of_the_configuration(study):
    settings, by_name = study
    lines = (ROOT / "docs/data/wires.jsonl").read_text().splitlines()
    record = {found["key"]: found for found in map(json.loads, lines)}
    cells = cells_on_record(record, list(by_name.values()), settings, 0.72)
    other = {"another study's": next(iter(record.values()))}
    assert cells_on_record(other, list(by_name.values()), settings, 0.72) == []
    assert {cell.method for cell in cells} == {method.label for method in by_name.values()}
    assert sum(len(cell.accuracies) for cell in cells) == len(record)
    published = tables(cells, "DDP")
    assert re.search(r"^\| ring, PowerSGD \| .* \| not reached \|", published, re.MULTILINE)
    row = published.splitlines()[2]
    assert row == "| DDP | 2,335 | 81.1 ± 0.6 | 51.4 (1.00) | 6.8 (1.00) | 3.1 (1.00) |"


@pytest.fixture
def study():
    with initialize_config_dir(str(ROOT / "benchmarks" / "wires"), version_base="1.3"):
        config = OmegaConf.to_container(compose("wires"), resolve=True)
    methods = {name: Method(**node) for name, node in config["methods"].items()}
    return config["settings"], methods


def test_steps_of_all_are_known_however_long_a_step_takes():
    """A rank of long steps sees those that others take meanwhile."""
    store = dist.HashStore()
    mine, others = StepsOfAll(store), StepsOfAll(store)
    for _ in range(7):
        others.one_more()
    wait_for(lambda: mine.one_more() >= mine.taken + 7)
    for each in (mine, others):
        each.close()


@pytest.mark.netns
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_study_goes_on_where_it_stopped(tmp_path):
    settings = {"steps": 4, "eval_every": 2, "warmup_steps": 1, "images": 400, "hidden": 256}
    options = [f"settings.{name}={value}" for name, value in settings.items()]
    options += ["rates=[]", "straggler_rates=[200mbit]", "seeds=[1]", "target=0.01"]
    command = [*forked.python(), "-m", "benchmarks.wires.study", f"hydra.run.dir={tmp_path}"]
    for name in ("ddp", "fp16"):
        again = run([*command, *options, f"only=[{name}]"], **forked.ranks())
        assert again.returncode == 0, again.stdout
    assert "1/1 200mbit, slow rank: ring, fp16, seed 1" in again.stdout
    results = list(map(json.loads, (tmp_path / "runs.jsonl").read_text().splitlines()))
    parameters = 32 * 10 + (32 * 32 + 1) * 256 + 257 * 256 + 4 * 256 + 257 * 100
    for found, bytes_each in zip(results, (4, 2), strict=True):
        assert found["bytes_per_step"] == pytest.approx(bytes_each * parameters, rel=0.15)
    for name in ("DDP", "ring, fp16"):  # of the first command, too
        assert f"| {name} |" in (tmp_path / "wires.md").read_text()
