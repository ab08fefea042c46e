"""Profiles recorded on real ranks: the slowest one's times, and training that goes on as it was."""

import pytest
import torch

from lightning_ring.cli import plan
from lightning_ring.errors import ConfigurationError
from lightning_ring.monitor import RingProfile
from lightning_ring.tools.plan.inputs import read_profile
from tests.checks.models import RANK, SIZE, WORLD, assert_all_ranks_equal, ddp, trainer
from tests.checks.slow_model import Slow, batches, weights

SLOWER = 0.012  # of the last rank's backward, a layer
STEPS = 6


def train(strategy, *callbacks):
    torch.manual_seed(0)
    module = Slow(backward=SLOWER if RANK == SIZE - 1 else 0.004)
    trainer(strategy, max_epochs=1, callbacks=list(callbacks)).fit(
        module, batches(SIZE * (STEPS + 3))
    )
    return weights(module)


def check_a_run_of_the_ring_is_recorded(tmp_path):
    plain, path = train("ring"), tmp_path / "ring.json"
    trained = train("ring", RingProfile(path, steps=STEPS - 2, warmup=2))
    assert torch.equal(trained, plain), "it trained something else while it was recorded"
    assert_all_ranks_equal(trained)
    WORLD.Barrier()
    assert [file.name for file in tmp_path.iterdir()] == ["ring.json"]
    found = read_profile(path)
    names = [gradient.name.split(".")[1] for gradient in found.gradients]
    assert names == ["2", "2", "1", "1", "0", "0"], "backward comes to the last layer first"
    for layer, gradient in enumerate(found.gradients[::2], start=1):
        assert gradient.ready >= layer * SLOWER, "the slowest rank's times are recorded"
    assert found.phases.backward == found.gradients[-1].ready
    assert found.phases.forward >= 3 * 0.004
    run = found.run
    assert (run.world_size, run.num_nodes, run.steps) == (SIZE, 1, 4)
    words = [str(path), "--network", "1gbit", "--node", "30,100"]
    assert plan.main(words) == 0


def check_what_is_not_the_ring_is_refused_on_several_ranks():
    for strategy, said in ((ddp(), "DDPStrategy"), ("ring_sharded", "Sharded")):
        run = trainer(strategy, max_steps=1, callbacks=[RingProfile("profile.json")])
        with pytest.raises(ConfigurationError, match=f"cannot record {said} on 2 ranks"):
            run.fit(Slow(), batches(2))
