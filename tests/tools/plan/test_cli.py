"""`lightning-ring plan`: what it prints and writes, and what it refuses."""

import json
import math
from pathlib import Path

import pytest

from lightning_ring.cli import main as dispatcher
from lightning_ring.cli import plan
from lightning_ring.comm.cost import CostModel
from lightning_ring.tools.bench import COLLECTIVES, session
from lightning_ring.tools.plan.inputs import (
    NETWORKS,
    parse_link,
    read_bench,
    read_profile,
    write_profile,
)
from tests.refusals import refused
from tests.tools.plan.profiles import gradient, profile, several


@pytest.fixture
def path(tmp_path):
    write_profile(profile(*several()), tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def test_what_was_written_is_read(tmp_path):
    some = profile(*several())
    write_profile(some, tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == some
    assert [file.name for file in tmp_path.iterdir()] == ["p.json"]


def test_a_profile_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    write_profile(profile(*several()), tmp_path / "p.json")
    before = (tmp_path / "p.json").read_bytes()

    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_profile(profile(gradient("w", 1, 0.1)), tmp_path / "p.json")
    assert (tmp_path / "p.json").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["p.json"]


def test_the_table(path, capsys):
    asked = ["--network", "10gbit", "--node", "30,200", "--ranks-per-node", "8"]
    assert dispatcher.main(["plan", path, *asked]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.strip() and line.split()[-1].endswith("%")]
    ranks = [int(row.split()[0].replace(",", "")) for row in rows]
    assert ranks == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 10_000]
    assert any(line.startswith("what to change first: ") for line in lines)
    assert any(line.startswith("assumed: every rank as fast") for line in lines)
    assert any(line.startswith("not predicted, measure them: int8") for line in lines)
    assert not any("warning" in line for line in lines)
    ways = ("RingStrategy()", "algorithm=Sharded()", "compression='bf16'", "LocalSGD(8)")
    assert all(any(way in line for line in lines) for way in (*ways, "LocalSGD(32)"))
    assert any(line.startswith("on 64 ranks ") for line in lines)


def written(folder, content):
    """The path of a bench's file."""
    (folder / "bench.json").write_text(json.dumps(content))
    return str(folder / "bench.json")


def test_a_link_that_misleads_is_a_warning(path, tmp_path, capsys):
    for device, residual, warned in (
        ("cpu", 0.5, ()),
        ("NVIDIA H200", 0.1, ("was measured on NVIDIA H200, and the profile was recorded on cpu",)),
        ("cpu", 11.0, ("are up to 1100% away from its α and B",)),
    ):
        model = {"backend": "auto", "alpha_seconds": 1e-4, "bandwidth": 1e9, "residual": residual}
        models = [model | {"collective": name} for name in COLLECTIVES]
        bench = written(tmp_path, {"world": {"device": device}, "models": models})
        assert plan.main([path, "--network", bench]) == 0
        said = capsys.readouterr().out
        assert said.count("warning: ") == len(warned)
        assert all(words in said for words in warned)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--network carrier-pigeon", "--network carrier-pigeon: is no network. Measure yours"),
        ("--network 5,-1", "speed (more than 0)"),
        ("--network nowhere.json", "No such file"),
        ("--network 1gbit --ranks 0", "--ranks 0: must be from 1 to 10,000"),
        ("--network 1gbit --ranks 2,many", "--ranks 2,many: write numbers of ranks"),
        ("--network 1gbit --ranks-per-node 0", "--ranks-per-node 0: must be"),
        ("--network 1gbit --ranks-per-node 8", "8 ranks a node: say how those talk"),
        ("--network 1gbit --node 30,200 --ranks-per-node 8 --ranks 12", "such as 8"),
    ],
)
def test_what_cannot_be_planned_is_one_line(path, options, said, capsys):
    assert dispatcher.main(["plan", path, *options.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda content: content.update(format=2), "no profile of lightning_ring in format 3"),
        (lambda content: content.update(kind="shopping list"), "no profile of lightning_ring"),
        (lambda content: content.pop("phases"), "KeyError('phases')"),
        (lambda content: content["phases"].pop("other"), "TypeError"),
    ],
)
def test_a_damaged_profile_is_one_line(path, damage, said, capsys):
    content = json.loads(Path(path).read_text())
    damage(content)
    Path(path).write_text(json.dumps(content))
    assert dispatcher.main(["plan", path, "--network", "1gbit"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert path in line
    assert said in line


@pytest.mark.parametrize("content", ["{", "7"])
def test_what_is_no_profile_is_one_line(path, content):
    Path(path).write_text(content)
    with refused(r"is not JSON|is JSON, but no profile"):
        plan.main([path, "--network", "1gbit"])


def test_links_by_name_number_and_measurement(tmp_path):
    assert parse_link("10gbit", "--network").costs["all_gather"] == NETWORKS["10gbit"]
    assert parse_link("30,10", "--network").costs["all_gather"] == CostModel(30 * 1e-6, 1.25e9)
    models = [
        {"collective": name, "backend": backend, "alpha_seconds": alpha, "bandwidth": bandwidth}
        for backend, bandwidth in (("gloo", 1e8), ("auto", 2e8))
        for alpha, name in ((1e-5, "all_reduce"), (2e-5, "reduce_scatter"), (3e-5, "all_gather"))
    ]
    measured = parse_link(written(tmp_path, {"models": models}), "--network")
    assert measured.costs["reduce_scatter"] == CostModel(2e-5, 2e8)
    models[3]["bandwidth"] = math.inf
    content = session.bench_json([], models, {"world_size": 2}, {})
    json.dumps(content, allow_nan=False)
    measured = read_bench(written(tmp_path, content))
    assert measured.costs["all_reduce"] == CostModel(1e-5, math.inf)
    with refused("holds no α and B for all"):
        parse_link(written(tmp_path, {"models": models[:2]}), "--network")
