"""What a card is to time with ``benchmarks.step.optim`` runs here, with a few parameters."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks.step import optim
from lightning_ring.optim.engine import triton_kernel
from lightning_ring.optim.engine.parameter_list import TensorKind
from lightning_ring.optim.engine.trace import measure_body
from tests.processes import run


def test_graphs_report_each_optimizer_and_block() -> None:
    copy, *rows = map(json.loads, optim.graphs("cpu", tiny=True))
    assert [(row["optimizer"], row["block"]) for row in rows] == [
        (name, block) for name in ("LAMB", "LARS") for block in (1024, 2048)
    ]
    count = 64 * 64 + 64 + 1
    for row in rows:
        needed = {"LAMB": 40, "LARS": 28}[row["optimizer"]] * count
        assert row["gb_per_s"] == pytest.approx(needed / row["ms"] / 1e6)
        assert row["share_of_copy"] == pytest.approx(row["gb_per_s"] / copy["copy_gb_per_s"])


def test_the_block_of_a_graph_is_that_of_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[int] = []
    kind = TensorKind(
        torch.device("cuda"), torch.float32, torch.float32, torch.float32, None, flat=True
    )

    def step_of(optimizer: torch.optim.Optimizer, device: str) -> optim.Step:
        blocks.append(triton_kernel.block_size(measure_body(type(optimizer)), kind))
        return lambda: None

    monkeypatch.setattr(optim, "captured_step", step_of)
    list(optim.graph_rows({"tiny": optim.TINY}, 1.0, "cpu", num_calls=1))
    assert blocks == [1024, 2048] * 2


@pytest.mark.parametrize("name", ["LAMB", "LARS"])
def test_the_host_time_is_that_of_the_steps_around_the_launches(name: str) -> None:
    assert 0 < optim.host_ms(name, optim.TINY, num_steps=3) < 1000


@pytest.mark.ranks
def test_the_command_line() -> None:
    command = [sys.executable, "-m", "benchmarks.step.optim", "--tiny", "--device", "cpu"]
    done = run([*command, "--host", "--graphs", "--steps", "2"], timeout=100)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["host_ms"] > 0 for line in lines if "host_ms" in line] == [True, True]
    assert sum("share_of_copy" in line for line in lines) == 4
