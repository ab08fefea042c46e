"""The first second of a run: mistakes that need no torch, and ranks whose parent does without
it.
"""

import re

import pytest

from lightning_ring.errors import ConfigurationError
from recipes.start import check, start_ranks
from tests import forked


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "RANK", "WORLD_SIZE", "RING_RANK"):
        monkeypatch.delenv(name, raising=False)


def started_by_torchrun(monkeypatch, ranks):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, ranks)


MISTAKES = [
    (["trainer.devices=3"], r"batch_size=64.*3 ranks.*63 or 66"),
    (
        ["experiment=scan_to_identify", "data.images_per_class=5"],
        r"32 images, .* data.images_per_class=5",
    ),
    (
        [
            "experiment=scan_to_identify",
            "data=shards",
            "data.folder=FOLDER",
            "data.num_classes=3",
            "data.batch_size=16",
        ],
        r"takes 4 classes a step.* have 3. Choose data.sampler=balanced",
    ),
    (["data=shards"], r"data.folder=VALUE data.num_classes=VALUE"),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("overrides", "says"), MISTAKES)
def test_a_mistake_is_found_before_ranks_start(overrides, says, typed, tmp_path):
    """As a command: only Hydra's main function knows what was typed."""
    result = typed(*overrides)
    assert result.returncode == 1, result.stdout
    error, torch_imported = result.stdout.splitlines()[-2:]
    assert re.fullmatch(rf".*{says}.*", error)
    assert "Traceback" not in result.stdout
    assert torch_imported == "torch in the parent: False"
    assert "mpirun" not in result.stdout
    assert not list(tmp_path.glob("**/events.*"))


@pytest.mark.parametrize(
    "override",
    ["strategy=ddp", "strategy.start_method=fork", "trainer.devices=1", "trainer.devices=auto"],
)
def test_ranks_that_others_start_are_left_to_them(override, composed):
    start_ranks(composed(override))


def test_inside_a_launcher_nothing_is_started_and_its_ranks_are_counted(composed, monkeypatch):
    started_by_torchrun(monkeypatch, "3")
    start_ranks(composed())
    with pytest.raises(ConfigurationError, match="over all 3 ranks"):
        check(composed())


@pytest.mark.ranks
def test_the_recipe_trains_with_ddp_too(typed):
    result = typed(
        "strategy=ddp",
        "trainer.max_epochs=1",
        "+trainer.limit_train_batches=2",
        "schedule.warmup=0",
        **forked.every(),
    )
    assert result.returncode == 0, result.stdout
    assert "trained 1 epoch(s) on 2 rank(s)" in result.stdout
    assert "\x1b" not in result.stdout  # a line an epoch, as with ring
    assert "\r" not in result.stdout
