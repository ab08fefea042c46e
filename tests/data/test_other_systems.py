"""The package imports and the data path works without what macOS and Windows lack; the rest says
so.
"""

import subprocess

import pytest

from tests import forked
from tests.images import write_folder
from tests.processes import clean_env

# torch and Lightning ask for the system they were built for; only this package is without
HIDE = """
import os, sys
import lightning.pytorch, torch.utils.data, tqdm, PIL.Image, multiprocessing, shutil, subprocess, tempfile
for name in [name for name in sys.modules if name.startswith("lightning_ring")]:
    del sys.modules[name]
for name in {modules}:
    sys.modules[name] = None
for name in {functions}:
    delattr(os, name)
"""
TRAIN = """
import lightning_ring, lightning_ring.optim, lightning_ring.schedules
from lightning_ring.cli.main import main
from lightning_ring.errors import ConfigurationError

source, target = sys.argv[1:]
"""
MACOS = """
from lightning_ring.data import ImageFolder, RandomResizedCrop, ShardDataset, ShuffledSampler, image_loader
lightning_ring.RingStrategy, lightning_ring.distribute
assert main(["pack", source, target, "--size", "0"]) == 0
assert main(["pack", "--verify", target]) == 0
for dataset in (ShardDataset(target), ImageFolder(source)):
    sampler = ShuffledSampler(len(dataset))
    loader = image_loader(dataset, sampler, 3, crop=RandomResizedCrop(16), transform=None, num_threads=4)
    assert sum(len(images) for images, _ in loader) == len(dataset) == 21
"""
WINDOWS = """
import lightning_ring.data
for use in (lambda: lightning_ring.RingStrategy, lambda: lightning_ring.data.ShardDataset):
    try:
        use()
    except ConfigurationError as error:
        assert "needs Linux or macOS" in str(error)
    else:
        raise AssertionError("no error")
assert main(["doctor"]) == main(["pack", source, target]) == 2
"""
SHARED = ["sched_getaffinity", "sched_setaffinity", "posix_fadvise"]
SYSTEMS = {
    "macOS": ([], SHARED, MACOS),
    "Windows": (
        ["fcntl", "resource", "termios"],
        [*SHARED, "pread", "register_at_fork", "fork", "getuid", "killpg", "setsid"],
        WINDOWS,
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_package_works_or_says_what_it_needs_without_what_a_system_lacks(tmp_path, system):
    modules, functions, use = SYSTEMS[system]
    code = HIDE.format(modules=modules, functions=functions) + TRAIN + use
    source = write_folder(tmp_path / "src")
    command = [*forked.python(), "-c", code, str(source), str(tmp_path / "dst")]
    result = subprocess.run(command, env=clean_env(), capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
