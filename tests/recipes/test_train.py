"""The recipe, run as a user runs it."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipes.data.digits import Digits
from recipes.models import SmallResNet
from tests import forked
from tests.processes import ROOT, mpirun_command, run

pytestmark = pytest.mark.ranks

SCRIPT = str(ROOT / "recipes" / "train.py")
LAST_LINE = re.compile(r"test accuracy (\d\.\d{4}) on 359 images")
SCALARS = {
    "train/loss",
    "train/accuracy",
    "val/loss",
    "val/accuracy",
    "lr-SGD/pg1",
    "ring/images_per_second",
    "test/accuracy",
}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def accuracy_of(output):
    """The accuracy in the last line; fails where that line is missing or printed by several
    ranks.
    """
    assert len(LAST_LINE.findall(output)) == 1, output
    match = LAST_LINE.fullmatch(output.strip().splitlines()[-1].strip())
    assert match, output
    return float(match.group(1))


def only_run_folder(name):
    (folder,) = Path("logs", name).iterdir()
    assert Path("latest", name).samefile(folder)
    return folder


def accuracy_in_one_process(checkpoint):
    """Test accuracy of the checkpoint, without Lightning and without ranks."""
    state = torch.load(checkpoint, weights_only=False)["state_dict"]
    network = SmallResNet(1, 10, widths=[16, 32, 64], blocks=1).eval()
    network.load_state_dict({name.removeprefix("network."): value for name, value in state.items()})
    data = Digits(batch_size=64)
    data.setup("test")
    images, labels = data.datasets["test"].tensors
    with torch.no_grad():
        return (network(images).argmax(1) == labels).double().mean().item()


def test_default_recipe_starts_two_ranks_and_reads_digits(typed):
    result = typed()
    assert result.returncode == 0, result.stdout
    output, torch_imported = result.stdout.split("torch in the parent: ")
    assert torch_imported == "False\n"
    assert accuracy_of(output) >= 0.97
    assert "trained 20 epoch(s) on 2 rank(s)" in output
    assert output.count("GPU available") == 1
    # a line for each epoch where output is no terminal
    assert result.stdout.count(", img/s ") == 20
    assert "\x1b" not in result.stdout
    folder = only_run_folder("digits")
    assert {file.name for file in (folder / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    assert (folder / ".hydra" / "config.yaml").exists()
    events = EventAccumulator(str(folder))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= SCALARS
    assert all(point.value > 0 for point in events.Scalars("ring/images_per_second"))


@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_ranks_of_a_launcher_share_one_folder_and_count_each_image_once(launcher):
    command = [*forked.python(), SCRIPT, "trainer.max_epochs=1"]
    if launcher == "torchrun":
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command = [*forked.python(), *torchrun, *command[-2:]]
    else:
        command = mpirun_command(2, *command)
    result = run(command, **forked.ranks())
    assert result.returncode == 0, result.stdout
    assert {path.name for path in Path().iterdir()} == {"latest", "logs"}
    expected = accuracy_in_one_process(only_run_folder("digits") / "checkpoints" / "best.ckpt")
    assert accuracy_of(result.stdout) == pytest.approx(expected, abs=1e-4)


def test_help_names_every_group_and_how_to_start():
    result = run([sys.executable, SCRIPT, "--help"])
    assert result.returncode == 0
    for group in (ROOT / "configs").iterdir():
        if group.is_dir():
            names = ", ".join(sorted(file.stem for file in group.glob("*.yaml")))
            assert f"{group.name}: {names}\n" in result.stdout
    for words in ("mpirun -n", "torchrun", "ckpt_path=", "hydra.run.dir=", "tensorboard --logdir"):
        assert words in result.stdout


MISTAKES = {
    ("hydra.run.dir=file/inside",): "The log folder cannot be written: .*hydra.run.dir=FOLDER",
    ("trainer.max_epoch=3",): "Could not override 'trainer.max_epoch'",
    ("experiment=debug", "data.batch_size=0"): "data.batch_size=0 .* must be a positive multiple",
}


def test_mistakes_are_told_without_a_long_traceback():
    Path("file").touch()
    with ThreadPoolExecutor() as pool:  # most of each run is imports
        results = list(pool.map(lambda words: run([sys.executable, SCRIPT, *words]), MISTAKES))
    for result, message in zip(results, MISTAKES.values(), strict=True):
        assert result.returncode != 0
        assert re.search(message, result.stdout), result.stdout
        assert result.stdout.count('  File "') <= 2, result.stdout
