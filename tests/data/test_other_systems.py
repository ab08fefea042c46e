"""The package imports and the data path works without what macOS and Windows lack; the rest says
so.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.images import write_folder
from tests.processes import clean_env

# torch and Lightning ask for the system they were built for; only this package is without
HIDE = """
import os, signal, sys
import lightning.pytorch, torch.utils.data, tqdm, PIL.Image, multiprocessing, shutil, subprocess, tempfile
for name in {modules}:
    sys.modules[name] = None
for module, names in ((os, {functions}), (signal, {signals})):
    for name in names:
        delattr(module, name)
"""
TRAIN = """
import lightning_ring, lightning_ring.monitor, lightning_ring.optim, lightning_ring.schedules
from lightning_ring.cli.main import main
from lightning_ring.data import ImageFolder, RandomResizedCrop, ShardDataset, ShuffledSampler, image_loader

source, target = sys.argv[1:]
assert main(["pack", source, target, "--size", "0"]) == 0
assert main(["pack", "--verify", target]) == 0
for dataset in (ShardDataset(target), ImageFolder(source)):
    sampler = ShuffledSampler(len(dataset), rank=0, world_size=1)
    loader = image_loader(dataset, sampler, 3, crop=RandomResizedCrop(16), transform=None, num_threads=4)
    assert sum(len(images) for images, _ in loader) == len(dataset) == 21
"""
WINDOWS = """
from lightning_ring.errors import ConfigurationError
for use in (lambda: lightning_ring.RingStrategy, lambda: lightning.pytorch.Trainer(strategy="ring", logger=False)):
    try:
        use()
    except ConfigurationError as error:
        assert "needs Linux or macOS" in str(error)
    else:
        raise AssertionError("no error")
assert main(["doctor"]) == 2
"""


@pytest.mark.ranks
@pytest.mark.parametrize("system", ["macOS", "Windows"])
def test_data_is_packed_and_loaded_without_what_a_system_lacks(tmp_path, system):
    functions = ["sched_getaffinity", "sched_setaffinity", "posix_fadvise"]
    modules, signals, more = [], [], "lightning_ring.RingStrategy, lightning_ring.distribute"
    if system == "Windows":
        functions += [
            "pread",
            "register_at_fork",
            "fork",
            "O_CLOEXEC",
            "geteuid",
            "getuid",
            "killpg",
            "setsid",
        ]
        modules, signals = (
            ["fcntl", "resource", "termios"],
            ["SIGUSR1", "SIGUSR2", "SIGKILL", "SIGCHLD", "SIGSTOP"],
        )
        more = WINDOWS
    code = HIDE.format(modules=modules, functions=functions, signals=signals) + TRAIN + more
    source = write_folder(tmp_path / "src")
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "dst")]
    result = subprocess.run(command, env=clean_env(), capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
