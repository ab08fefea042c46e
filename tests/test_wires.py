"""The study of wires: its table on made-up runs, and a tiny study on real hosts."""

import json
import time
from dataclasses import replace

import pytest
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from benchmarks.wires.rank import StepsOfAll
from benchmarks.wires.study import (
    Cell,
    Method,
    Run,
    bits_per_second,
    cells_on_record,
    seconds_until,
    table,
    tables,
)
from tests import forked
from tests.hosts import why_not
from tests.processes import ROOT, run


def result(method, seed, curve, accuracy=0.9):
    about = {
        "method": method,
        "rate": "1gbit",
        "straggler": False,
        "seed": seed,
        "steps": 20,
        "bytes_per_step": 5e5,
    }
    return about | {"curve": curve, "accuracy": accuracy}


def test_time_to_target_is_that_of_the_first_evaluation_that_reaches_it():
    assert seconds_until([(1.0, 0.5), (2.0, 0.8), (3.0, 0.7), (4.0, 0.9)], 0.7) == 2.0
    assert seconds_until([(1.0, 0.5)], 0.7) == float("inf")


def test_the_table_says_what_was_not_reached():
    slow = [result("DDP", seed, [(2.0, 0.5), (4.0 + seed, 0.8)]) for seed in range(3)]
    fast = [result("ring", seed, [(1.0, 0.8), (2.0, 0.8)], 0.8 + 0.1 * seed) for seed in range(3)]
    never = [result("lost", seed, [(1.0, 0.5)]) for seed in range(2)] + [
        result("lost", 2, [(1.0, 0.9)])
    ]
    cells = [Cell.of(results, 0.7) for results in (slow, fast, never)]
    rows = [
        [word.strip() for word in row.split("|")[1:-1]] for row in table(cells, "DDP").splitlines()
    ]
    assert rows[0] == ["method", "kB a step", "test accuracy, %", "1gbit"]
    assert rows[2:4] == [
        ["DDP", "500", "90.0 ± 0.0", "5.0 (1.00)"],
        ["ring", "500", "90.0 ± 10.0", "1.0 (0.20)"],
    ]
    assert rows[4][3] == "not reached"


def test_tables_hold_all_runs_on_record_whatever_command_made_them(study):
    settings, by_name = study
    methods = [by_name["ddp"], by_name["ring"]]
    record = {}

    def put(method, rate, straggler, seed, settings=settings):
        found = result(method.label, seed, [(2.0, 0.8)]) | {"rate": rate, "straggler": straggler}
        record[Run(method, rate, straggler, seed).key(settings)] = found

    for seed in (1, 2, 3):
        put(methods[0], "10gbit", False, seed)
    put(methods[0], "100mbit", True, 1)
    put(methods[0], "100mbit", False, 1)
    for seed in (2, 1):
        put(methods[1], "10gbit", False, seed)
    # another study's
    put(methods[1], "100mbit", False, 1, settings | {"steps": settings["steps"] + 1})
    # what its configuration has no more
    put(replace(methods[1], momentum=0.1), "100mbit", False, 1)
    cells = cells_on_record(record, methods, settings, 0.72)
    assert [(cell.method, cell.wire, len(cell.accuracies)) for cell in cells] == [
        ("DDP", "100mbit", 1),
        ("DDP", "10gbit", 3),
        ("ring", "10gbit", 2),
        ("DDP", "100mbit, slow rank", 1),
    ]
    equal, slow = tables(cells, "DDP").split("\n\n")
    assert [row.split("|")[4:-1] for row in equal.splitlines()[-2:]] == [
        ["  ", " 2.0 (1.00) "],
        [" 1 ", " 2 to 3 "],
    ]
    assert "slow rank" not in equal
    assert slow.splitlines()[0].count("slow rank") == 1
    assert cells_on_record({}, methods, settings, 0.72) == []


def test_rates_are_read_as_tc_does():
    assert [bits_per_second(rate) for rate in ("8bit", "100mbit", "1.5gbit")] == [8, 1e8, 1.5e9]


def test_the_published_runs_are_those_of_the_configuration(study):
    settings, by_name = study
    record = {
        result["key"]: result
        for result in map(json.loads, (ROOT / "docs/data/wires.jsonl").read_text().splitlines())
    }
    cells = cells_on_record(record, list(by_name.values()), settings, 0.72)
    assert {cell.method for cell in cells} == {method.label for method in by_name.values()}
    assert sum(len(cell.accuracies) for cell in cells) == len(record)
    row = tables(cells, "DDP").splitlines()[2]
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
    until = time.monotonic() + 30
    while mine.one_more() < mine.taken + 7:
        assert time.monotonic() < until
        time.sleep(0.01)
    for each in (mine, others):
        each.close()


@pytest.mark.netns
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_study_goes_on_where_it_stopped(tmp_path):
    options = [
        "rates=[]",
        "straggler_rates=[200mbit]",
        "seeds=[1]",
        "settings.steps=4",
        "settings.eval_every=2",
    ]
    options += [
        "settings.warmup_steps=1",
        "settings.images=400",
        "settings.hidden=256",
        "target=0.01",
        f"hydra.run.dir={tmp_path}",
    ]
    command = [*forked.python(), "-m", "benchmarks.wires.study", *options]
    first = run([*command, "only=[ddp]"], **forked.ranks())
    assert first.returncode == 0, first.stdout
    again = run([*command, "only=[fp16]"], **forked.ranks())
    assert again.returncode == 0, again.stdout
    assert "1/1 200mbit, slow rank: ring, fp16, seed 1" in again.stdout
    results = list(map(json.loads, (tmp_path / "runs.jsonl").read_text().splitlines()))
    parameters = 32 * 10 + (32 * 32 + 1) * 256 + 257 * 256 + 4 * 256 + 257 * 100
    for found, bytes_each in zip(results, (4, 2), strict=True):
        assert found["bytes_per_step"] == pytest.approx(bytes_each * parameters, rel=0.15)
    for name in ("DDP", "ring, fp16"):  # of the first command, too
        assert f"| {name} |" in (tmp_path / "wires.md").read_text()
