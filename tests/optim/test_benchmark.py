"""What a card is to time with ``benchmarks.step.optim`` runs here, with a few parameters."""

from __future__ import annotations

import pytest
import torch

from benchmarks.step import optim
from lightning_ring.optim.engine import triton_kernel
from lightning_ring.optim.engine.parameter_list import TensorKind
from lightning_ring.optim.engine.trace import measure_body


def test_graphs_report_each_optimizer_and_block() -> None:
    rows = list(optim.graph_rows({"tiny": optim.TINY}, 10.0, "cpu", num_calls=1))
    assert [(row["optimizer"], row["block"]) for row in rows] == [
        (name, block) for name in ("LAMB", "LARS") for block in (1024, 2048)
    ]
    count = 64 * 64 + 64 + 1
    for row in rows:
        needed = {"LAMB": 40, "LARS": 28}[row["optimizer"]] * count
        assert row["gb_per_s"] == pytest.approx(needed / row["ms"] / 1e6)
        assert row["share_of_copy"] == pytest.approx(row["gb_per_s"] / 10)
    assert optim.copy_bandwidth("cpu", 1 << 20) > 0


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
