"""`RingProfile` on one rank and on two, read by `lightning-ring plan`; and the check between
hosts, run once.
"""

import re
import shlex

import pytest
import torch

from benchmarks.step.plan import WAYS
from lightning_ring.cli import plan
from lightning_ring.errors import ConfigurationError
from lightning_ring.monitor import RingProfile, StepTimer
from lightning_ring.tools.plan.inputs import read_profile, write_profile
from tests import forked
from tests.battery import check_names
from tests.checks.slow_model import Slow, batches, weights
from tests.hosts import why_not
from tests.processes import run
from tests.tools.plan.profiles import profile, several
from tests.trainers import quiet_trainer

MODULE = "tests.checks.profile"


def fit(module, count, *callbacks, **arguments):
    trainer = quiet_trainer(max_epochs=1, callbacks=list(callbacks), **arguments)
    trainer.fit(module, batches(count))
    return weights(module)


def slow(**arguments):
    torch.manual_seed(0)
    return Slow(**arguments)


def test_one_rank_is_enough_to_plan_for_many(tmp_path, capsys, caplog):
    path = tmp_path / "profile.json"
    frozen = slow(layers=4)
    frozen.layers[0].requires_grad_(False)
    with caplog.at_level("INFO"):
        recorded = fit(frozen, 9, RingProfile(path, steps=5, warmup=2))
    hint = caplog.text.partition("Next: lightning-ring plan ")[2].splitlines()[0]
    again = slow(layers=4)
    again.layers[0].requires_grad_(False)
    assert torch.equal(recorded, fit(again, 9))
    assert not any(param._post_accumulate_grad_hooks for param in frozen.parameters())
    found = read_profile(path)
    assert found.run.model == "Slow"
    assert found.run.num_parameters == 4 * (32 * 32 + 32)
    assert {gradient.name.split(".")[1] for gradient in found.gradients} == {"1", "2", "3"}
    assert [
        gradient.ready >= 0.01 * (1 + index // 2) for index, gradient in enumerate(found.gradients)
    ] == [True] * 6
    assert found.run.world_size == 1
    assert found.phases.forward >= 4 * 0.004
    assert plan.main(shlex.split(hint)) == 0
    assert "Slow (4,224 parameters" in capsys.readouterr().out


@pytest.mark.ranks
def test_the_ring_on_one_rank_is_recorded_too(tmp_path):
    from lightning_ring import RingStrategy

    path = tmp_path / "profile.json"
    strategy = RingStrategy(force_communication=True, compression="bf16")
    fit(slow(forward=0, backward=0), 4, RingProfile(path, steps=2, warmup=1), strategy=strategy)
    assert read_profile(path).run.world_size == 1


def test_a_training_that_is_too_short_writes_nothing_and_leaves_no_hook(tmp_path):
    module = slow(forward=0, backward=0)
    fit(module, 3, RingProfile(tmp_path / "profile.json", steps=5, warmup=2))
    assert list(tmp_path.iterdir()) == []
    assert not isinstance(module.trainer.profiler, StepTimer), "the Trainer has its own back"
    assert not any(param._post_accumulate_grad_hooks for param in module.parameters())


@pytest.mark.parametrize(
    ("automatic", "arguments", "name", "said"),
    [
        (True, {}, "nowhere/profile.json", "cannot be written"),
        (False, {}, "profile.json", "manual optimization"),
        (True, {"accumulate_grad_batches": 2}, "profile.json", "accumulate_grad_batches is 2"),
    ],
)
def test_what_cannot_be_recorded_is_an_error_before_the_first_step(
    automatic, arguments, name, said, tmp_path
):
    built = Slow(forward=0, backward=0)
    built.automatic_optimization = automatic
    before = weights(built)
    with pytest.raises(ConfigurationError, match=said):
        fit(built, 2, RingProfile(tmp_path / name), **arguments)
    assert torch.equal(weights(built), before)


@pytest.mark.parametrize("check", check_names(MODULE))
def test_on_two_ranks(battery, check):
    battery(MODULE, 2, check)


@pytest.mark.ranks
@pytest.mark.netns
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_prediction_and_run_between_hosts_are_put_side_by_side(tmp_path):
    """That the check runs. Whether it agrees, `python -m benchmarks.step.plan` tells on a quiet
    machine.
    """
    small = profile(*several(6, 0.03), forward=0.01, backward=0.03, optimizer=0.002)
    write_profile(small, tmp_path / "profile.json")
    words = ["--rates", "10gbit", "--hosts", "3", "--steps", "2", "--bench-seconds", "0.05"]
    command = [*forked.python(), "-m", "benchmarks.step.plan", *words]
    result = run([*command, "--profile", str(tmp_path / "profile.json")], **forked.every())
    assert result.returncode == 0, result.stdout
    rows = re.findall(r"10gbit +3 +3 +(\w+), flat +([\d.]+) +([\d.]+)", result.stdout)
    assert [way for way, _, _ in rows] == list(WAYS)
    # it sleeps as long as it computed
    assert all(float(measured) >= 1e3 * small.phases.alone - 2 for _, _, measured in rows)
