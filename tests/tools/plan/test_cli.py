"""`lightning-ring plan`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lightning_ring.cli import main as dispatcher
from lightning_ring.cli import plan
from lightning_ring.comm.cost import CostModel
from lightning_ring.errors import ConfigurationError
from lightning_ring.tools.bench import session
from lightning_ring.tools.plan.networks import NETWORKS, parse_link, read_bench
from lightning_ring.tools.plan.profile import (
    Model,
    Phases,
    Run,
    fingerprint,
    json_text,
    read_profile,
    write_profile,
)
from tests.processes import clean_env
from tests.tools.plan.profiles import gradient, profile, several

COSTS = dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), CostModel(1e-4, 1e8))


@pytest.fixture
def path(tmp_path: Path) -> str:
    write_profile(profile(*several()), tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    written = replace(profile(*several()), link_level="network", link=COSTS)
    write_profile(written, tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == written
    assert [file.name for file in tmp_path.iterdir()] == ["p.json"]


def test_a_profile_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_profile(profile(*several()), tmp_path / "p.json")
    before = (tmp_path / "p.json").read_bytes()

    def full(self: Path, text: str) -> int:
        with open(self, "w") as file:
            file.write(text[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_profile(profile(gradient("w", 1, 0.1)), tmp_path / "p.json")
    assert (tmp_path / "p.json").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["p.json"]


def test_table_json_and_plot(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    asked = [
        "--network",
        "10gbit",
        "--node",
        "nvlink4",
        "--ranks-per-node",
        "8",
        "--bucket-cap-mb",
        "5",
    ]
    assert dispatcher.main(["plan", path, *asked, *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    ranks = [
        int(line.split()[0].replace(",", ""))
        for line in lines
        if line.strip() and line.split()[-1].endswith("%")
    ]
    assert ranks == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 10_000]
    assert any(line.startswith("what to change first: on 64 ranks") for line in lines)
    assert any(line.startswith("assumed: every rank as fast") for line in lines)
    assert any(
        line.startswith("predictions lean low: on CPUs they were 30% to 1% below") for line in lines
    )
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["error_range"] == [-0.30, -0.01]
    assert {
        way: [step["world_size"] for step in steps] for way, steps in found["predictions"].items()
    } == dict.fromkeys(("flat", "hierarchical", "sharded"), ranks)
    assert all(step["efficiency"] > 0 for steps in found["predictions"].values() for step in steps)
    assert found["settings"]["bucket_cap_mb"] == 5
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_advice_and_table_are_for_the_topology_that_the_strategy_takes(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", path, "--network", "10gbit", "--ranks-per-node", "4", "--ranks", "64"]

    def planned(*more: str) -> str:
        assert dispatcher.main([*asked, *more]) == 0
        return capsys.readouterr().out

    usual = planned("--node", "nvlink4")
    assert "topology auto, which is hierarchical on several nodes" in usual
    assert "topology=" not in usual  # nothing to advise
    nested = planned("--node", "nvlink4", "--topology", "hierarchical")
    row = re.search(r"^ +64 .*$", usual, re.MULTILINE)
    assert row is not None
    assert row[0] in nested
    assert "topology='auto' saves most" in planned("--node", "nvlink4", "--topology", "flat")
    slow = planned("--node", "5000,0.1")
    assert (
        "topology='auto' takes the hierarchical one, which is slower here on 64 ranks: set "
        "topology='flat'" in slow
    )
    assert "topology='flat' saves most" in slow


def strictly(path: Path) -> Any:
    """What any reader of JSON makes of a file; Python's takes Infinity too, which is none."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in {path}")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_a_bandwidth_without_limit_is_null(tmp_path: Path) -> None:
    costs = COSTS | {"all_gather": CostModel(1e-4, math.inf)}
    recorded = replace(
        profile(*several(), run=Run(2, 2, "cpu", 16, 10)), link_level="network", link=costs
    )
    write_profile(recorded, tmp_path / "p.json")
    assert strictly(tmp_path / "p.json")["link"]["all_gather"] == {
        "alpha_seconds": 1e-4,
        "bandwidth": None,
    }
    assert read_profile(tmp_path / "p.json") == recorded
    assert plan.main([str(tmp_path / "p.json"), "--json", str(tmp_path / "out.json")]) == 0
    network = strictly(tmp_path / "out.json")["network"]
    assert network["all_gather"] == {"alpha_seconds": 1e-4, "bandwidth": None}
    assert network["all_reduce"]["bandwidth"] == 1e8


def test_a_recorded_link_needs_no_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = replace(
        profile(*several(), run=Run(2, 2, "cpu", 16, 10)), link_level="network", link=COSTS
    )
    write_profile(recorded, tmp_path / "p.json")
    assert plan.main([str(tmp_path / "p.json")]) == 0
    assert (
        "between ranks: measured by p.json: 100 µs a message, 0.1 GB/s" in capsys.readouterr().out
    )


def test_a_run_is_compared_with_its_prediction(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    took = Phases(0, 0, 0.05, 0.1, 0.01, 0, 0.04, total=0.4)
    run = replace(
        profile(*several(), run=Run(2, 2, "cpu", 16, 10)),
        phases=took,
        link_level="network",
        link=COSTS,
    )
    write_profile(run, tmp_path / "two.json")
    out = tmp_path / "out.json"
    words = [path, "--check", str(tmp_path / "two.json"), "--json", str(out)]
    with pytest.raises(ConfigurationError, match="Say which one to plan for"):
        plan.main(words)
    assert plan.main([*words, "--network", "800,0.8"]) == 0
    (check,) = json.loads(out.read_text())["checks"]
    predicted = json.loads(out.read_text())["predictions"]["flat"][1]["seconds"]
    assert check["predicted_seconds"] == pytest.approx(predicted)
    assert check["error"] == pytest.approx(predicted / 0.4 - 1)
    assert f"error {check['error']:+.1%}" in capsys.readouterr().out


def test_a_profile_of_another_model_is_an_error_that_names_both(path: str, tmp_path: Path) -> None:
    other = Model("Wide", fingerprint([("w", (8, 8), "torch.float32")]), 64)
    write_profile(replace(profile(gradient("w", 1, 0.1)), model=other), tmp_path / "other.json")
    with pytest.raises(ConfigurationError) as error:
        plan.main([path, "--network", "1gbit", "--check", str(tmp_path / "other.json")])
    for said in (
        path,
        "Net (1,000 parameters, 00000000)",
        str(tmp_path / "other.json"),
        f"Wide (64 parameters, {other.digest[:8]})",
    ):
        assert said in str(error.value)


def test_the_fingerprint_sees_names_shapes_and_dtypes() -> None:
    one = [("a", (2, 3), "torch.float32"), ("b", (4,), "torch.float32")]
    others = [
        one[::-1],
        [one[0], ("c", *one[1][1:])],
        [("a", (3, 2), one[0][2]), one[1]],
        [(*one[0][:2], "torch.float16"), one[1]],
    ]
    assert fingerprint(iter(one)) == fingerprint(one)
    assert len({fingerprint(each) for each in [one, *others]}) == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Say which one to plan for"),
        (
            ["--network", "carrier-pigeon"],
            "--network carrier-pigeon: is no network. Write one of 1gbit",
        ),
        (["--network", "0xib-hdr"], "is no network"),
        (["--network", "5,-1"], "a speed more than 0"),
        (["--network", "nowhere.json"], "nowhere.json: No such file"),
        (["--network", "1gbit", "--ranks", "0"], "--ranks 0: must be from 1 to 10,000"),
        (["--network", "1gbit", "--ranks", "2,many"], "'many' is no number of ranks"),
        (["--network", "1gbit", "--ranks", "2,³"], "'³' is no number of ranks"),
        (["--network", "1gbit", "--ranks", "10001"], "--ranks 10001: must be"),
        (["--network", "1gbit", "--at", "-3"], "--at -3: must be"),
        (["--network", "1gbit", "--ranks-per-node", "0"], "--ranks-per-node 0: must be"),
        (["--network", "1gbit", "--ranks-per-node", "8"], "8 ranks a node, and"),
        (
            ["--network", "1gbit", "--node", "nvlink4", "--ranks-per-node", "8", "--ranks", "12"],
            "such as 8",
        ),
        (["--network", "1gbit", "--bucket-cap-mb", "0"], "--bucket-cap-mb 0"),
        (["--network", "1gbit", "--bucket-cap-mb", "nan"], "--bucket-cap-mb nan"),
        (
            ["--network", "1gbit", "--json", "/nowhere/at/all.json"],
            "--json /nowhere/at/all.json: cannot be written",
        ),
        (["--network", "1gbit", "--plot", "plan.txt"], ".png"),
        (["--network", "1gbit", "--check", "nowhere.json"], "nowhere.json: No such file"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    path: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dispatcher.main(["plan", path, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def without(key: str) -> Any:
    return lambda content: content.pop(key)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda content: content.update(format=2), "has format 2, and this lightning_ring reads 1"),
        (lambda content: content.update(kind="shopping list"), "no profile of lightning_ring"),
        (without("phases"), "KeyError: 'phases'"),
        (lambda content: content["phases"].pop("other"), "TypeError"),
    ],
)
def test_a_damaged_profile_is_one_line(
    path: str, damage: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(Path(path).read_text())
    damage(content)
    Path(path).write_text(json.dumps(content))
    assert dispatcher.main(["plan", path, "--network", "1gbit"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert path in line
    assert said in line


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "7"])
def test_what_is_no_profile_is_one_line(path: str, content: str) -> None:
    Path(path).write_text(content)
    with pytest.raises(ConfigurationError, match=r"is not JSON|is JSON, but no profile"):
        plan.main([path, "--network", "1gbit"])


def test_a_profile_of_powersgd_without_shapes_wants_another_compression_named(
    tmp_path: Path,
) -> None:
    run = Run(1, 1, "cpu", 16, 10, compression="powersgd")
    write_profile(
        profile(*(replace(each, shape=None) for each in several()), run=run), tmp_path / "p.json"
    )
    with pytest.raises(
        ConfigurationError, match="'powersgd' sends follows from the gradients' shapes"
    ):
        plan.main([str(tmp_path / "p.json"), "--network", "1gbit"])
    assert plan.main([str(tmp_path / "p.json"), "--network", "1gbit", "--compression", "none"]) == 0


def test_links_by_name_number_and_measurement(tmp_path: Path) -> None:
    one, eight = parse_link("ib-hdr", "--network"), parse_link("8xib-hdr", "--network")
    assert (
        eight.costs["all_reduce"].bandwidth
        == 8 * one.costs["all_reduce"].bandwidth
        == 8 * NETWORKS["ib-hdr"].bandwidth
    )
    assert parse_link("30,10", "--network").costs["all_gather"] == CostModel(30 * 1e-6, 1.25e9)
    models = [
        {
            "collective": name,
            "backend": backend,
            "alpha_seconds": 1e-5 * (index + 1),
            "bandwidth": bandwidth,
        }
        for backend, bandwidth in (("gloo", 1e8), ("auto", 2e8))
        for index, name in enumerate(("all_reduce", "reduce_scatter", "all_gather"))
    ]
    (tmp_path / "bench.json").write_text(json.dumps({"models": models}))
    measured = parse_link(str(tmp_path / "bench.json"), "--network")
    assert measured.costs["reduce_scatter"] == CostModel(2e-5, 2e8)
    written = session.bench_json(
        [], [*models[:3], models[3] | {"bandwidth": math.inf}, *models[4:]], {"world_size": 2}, {}
    )
    (tmp_path / "bench.json").write_text(json_text(written))
    assert read_bench(str(tmp_path / "bench.json")).costs["all_reduce"] == CostModel(1e-5, math.inf)
    (tmp_path / "bench.json").write_text(json.dumps({"models": models[:2]}))
    with pytest.raises(ConfigurationError, match="holds no α and B for all"):
        parse_link(str(tmp_path / "bench.json"), "--network")


def test_a_plot_without_matplotlib_says_what_to_install(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install matplotlib"):
        plan.main([path, "--network", "1gbit", "--plot", "plan.png"])


def test_planning_imports_no_torch(path: str) -> None:
    code = (
        "import sys; from lightning_ring.cli.main import main\n"
        f"code = main(['plan', {path!r}, '--network', '1gbit', '--ranks', '1,2'])\n"
        "print(code, sorted(sys.modules.keys() & {'torch', 'lightning', 'mpi4py'}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=clean_env(), capture_output=True, text=True, timeout=240
    )
    assert result.stdout.splitlines()[-1] == "0 []", result.stderr


def test_the_profile_is_plain_json(path: str) -> None:
    content = json.loads(Path(path).read_text())
    assert content["phases"] == asdict(read_profile(path).phases)
    assert os.path.getsize(path) < 10_000
