"""docs/guides/slow-job.md: its commands work, small, and the names that it shows exist."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from lightning_ring.cli.pack import main as pack
from recipes import slow_job
from tests import forked
from tests.processes import ROOT, mpirun_command, run

GUIDE = (ROOT / "docs" / "guides" / "slow-job.md").read_text()
TOLD = [
    shlex.split(line, comments=True) for line in re.findall(r"^python .*$", GUIDE, re.MULTILINE)
]
SCRIPT = str(ROOT / "recipes" / "slow_job.py")
SMALL = {
    "draw": ["--num-images", "32", "--scale", "0.1"],
    "train": ["--epochs", "1", "--log-every", "1"],
}


def arguments(what, folder):
    """Of the guide's first command that does ``what``, with every file of it in ``folder``."""
    command = next(
        words for words in TOLD if words[1:3] == [str(Path(SCRIPT).relative_to(ROOT)), what]
    )
    words = [
        str(folder / word) if "/" in word or word == "photos" else word for word in command[2:]
    ]
    return [*words, *SMALL[what], "--logs", str(folder / "logs")]


@pytest.mark.ranks
def test_the_slow_job_trains_on_two_ranks_and_packs(tmp_path):
    options = slow_job.parse(arguments("draw", tmp_path))
    slow_job.draw(options.folder, options.num_images, options.scale)
    command = mpirun_command(
        2, "--wdir", str(tmp_path), *forked.python(), SCRIPT, *arguments("train", tmp_path)
    )
    result = run(command, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stdout

    events = json.loads((tmp_path / "logs" / "folder.json").read_text())["traceEvents"]
    lanes = {
        (event["pid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"
    }
    assert {
        (rank, lane) for rank in range(2) for lane in ("data wait", "waiting for communication")
    } <= lanes
    written = b"".join(file.read_bytes() for file in tmp_path.glob("logs/folder/version_0/events*"))
    named = set(re.findall(r"`(ring/\w+)`", GUIDE))
    assert named
    assert {name for name in named if name.encode() not in written} == set()

    assert pack([str(tmp_path / "photos"), str(tmp_path / "packed")]) == 0
    for rank in range(2):
        images, labels = next(iter(slow_job.packed_loader(tmp_path / "packed", rank, world_size=2)))
        assert images.shape == (8, 3, slow_job.PIXELS, slow_job.PIXELS)
        assert images.dtype == torch.float32
        assert len(set(labels.tolist())) == 2, "both ranks see small and large photographs"
