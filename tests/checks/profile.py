"""Profiles recorded on real ranks: the slowest one's times, the link, and training that goes on
as it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI

from lightning_ring.cli import plan
from lightning_ring.errors import ConfigurationError
from lightning_ring.monitor import RingProfile
from lightning_ring.tools.plan.profile import read_profile
from tests.checks.models import assert_all_ranks_equal, ddp, trainer
from tests.checks.slow_model import Slow, batches, weights

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
SLOWER = 0.012  # of the last rank's backward, a layer
STEPS = 6


def train(strategy: str, *callbacks: Any) -> torch.Tensor:
    torch.manual_seed(0)
    module = Slow(backward=SLOWER if RANK == SIZE - 1 else 0.004)
    trainer(strategy, max_epochs=1, callbacks=list(callbacks)).fit(
        module, batches(SIZE * (STEPS + 3))
    )
    return weights(module)


def check_ring_and_sharded_runs_are_recorded_and_compared(tmp_path: Path) -> None:
    plain = train("ring")
    for strategy in ("ring", "ring_sharded"):
        path = tmp_path / f"{strategy}.json"
        trained = train(strategy, RingProfile(path, steps=STEPS - 2, warmup=2))
        assert torch.equal(trained, plain), (
            f"{strategy} trained something else while it was recorded"
        )
        assert_all_ranks_equal(trained)
    MPI.COMM_WORLD.Barrier()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ring.json", "ring_sharded.json"]
    MPI.COMM_WORLD.Barrier()  # before the first writes its plan there
    ring, sharded = (read_profile(tmp_path / f"{name}.json") for name in ("ring", "ring_sharded"))
    for found in (ring, sharded):
        names = [gradient.name.split(".")[1] for gradient in found.gradients]
        assert names == ["2", "2", "1", "1", "0", "0"], "backward comes to the last layer first"
        for layer, gradient in enumerate(found.gradients[::2], start=1):
            assert gradient.ready >= layer * SLOWER, "the slowest rank's times are recorded"
        assert found.phases.backward == found.gradients[-1].ready
        assert found.phases.forward >= 3 * 0.004
        assert (
            found.run.world_size,
            found.run.num_nodes,
            found.run.batch_size,
            found.run.steps,
        ) == (SIZE, 1, 4, 4)
        assert found.link_level == "node"
        assert found.link is not None
        assert all(cost.alpha_seconds >= 0 and cost.bandwidth > 0 for cost in found.link.values())
        parts = found.phases
        assert parts.total >= parts.forward + parts.backward
    assert (ring.run.sharded, sharded.run.sharded) == (False, True)
    assert ring.model.digest == sharded.model.digest
    words = [
        str(tmp_path / "ring.json"),
        "--network",
        "1gbit",
        "--check",
        str(tmp_path / "ring_sharded.json"),
    ]
    assert plan.main([*words, "--json", str(tmp_path / f"plan-{RANK}.json")]) == 0


def check_a_strategy_that_is_not_ours_is_refused_on_several_ranks() -> None:
    run = trainer(ddp(), max_steps=1, callbacks=[RingProfile("profile.json")])
    with pytest.raises(
        ConfigurationError, match="records DDPStrategy on one rank only, and there are 2"
    ):
        run.fit(Slow(), batches(2))
