"""The scripts that the guide from Horovod ends in run on two ranks as they are printed; what it
names exists.
"""

import dataclasses
import re

import pytest

from lightning_ring.options import RingOptions
from tests import forked
from tests.processes import ROOT, mpirun_command, run

GUIDE = (ROOT / "docs" / "guides" / "from-horovod.md").read_text()
BEFORE, AFTER, WITHOUT_TRAINER = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


def on_two_ranks(script, folder):
    (folder / "script.py").write_text(script)
    command = mpirun_command(2, "--wdir", str(folder), *forked.python(), "script.py")
    result = run(command, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.mark.ranks
def test_the_script_moved_over_trains_and_saves_on_two_ranks(tmp_path):
    output = on_two_ranks(AFTER, tmp_path)
    accuracies = [float(value) for value in re.findall(r"epoch \d: accuracy (0\.\d+)", output)]
    assert len(accuracies) == 5, f"one line an epoch, from rank 0 alone:\n{output}"
    assert accuracies[-1] > 0.85, output
    assert sorted(file.name for file in tmp_path.glob("epoch*.ckpt")) == [
        f"epoch{epoch}.ckpt" for epoch in range(5)
    ]


@pytest.mark.ranks
def test_collectives_work_without_a_trainer(tmp_path):
    assert "mean 0.5 of rank 0, rank 1\n" in on_two_ranks(WITHOUT_TRAINER, tmp_path)


def test_both_scripts_have_the_same_settings():
    before, after = (
        re.findall(r"^EPOCHS, .*$", script, re.MULTILINE) for script in (BEFORE, AFTER)
    )
    assert before == after != []


def test_arguments_that_it_names_exist():
    arguments = set(re.findall(r"RingStrategy\((\w+)=", GUIDE))
    assert arguments <= {field.name for field in dataclasses.fields(RingOptions)}
