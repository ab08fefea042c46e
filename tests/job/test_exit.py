"""What is said of the error that ends a rank."""

import subprocess
import sys

import pytest

from lightning_ring.job.exit import in_one_line
from tests.processes import HANGS, clean_env
from tests.tools.doctor.planting import with_mounts

LARGE_BATCH = """
from torch import ones
from torch.utils.data import DataLoader
from lightning_ring.job.exit import in_one_line
try:
    for batch in DataLoader([ones(2**22)], num_workers=1):
        print("read", batch.shape)
except RuntimeError as error:
    print(in_one_line(error))
"""


def clean_up():
    try:
        raise OSError(28, "No space left on device")
    finally:
        raise RuntimeError("Call iter() first.\nThis loader has none.")


def translate():
    try:
        raise KeyError("photo")
    except KeyError:
        raise ValueError("no such photo") from None


def test_an_error_in_cleaning_up_does_not_hide_the_first_one():
    with pytest.raises(RuntimeError) as caught:
        clean_up()
    line = "RuntimeError: Call iter() first. (after OSError: [Errno 28] No space left on device)"
    assert in_one_line(caught.value) == line


def test_an_error_that_replaces_another_on_purpose_stands_alone():
    with pytest.raises(ValueError, match="no such photo") as caught:
        translate()
    assert in_one_line(caught.value) == "ValueError: no such photo"


@pytest.mark.ranks
def test_a_full_dev_shm_is_named_with_its_remedy():
    within = with_mounts("mount -t tmpfs -o size=8m tmpfs /dev/shm")
    if within is None:
        pytest.skip("needs root, or user namespaces, to change what this host has")
    command = [*within, sys.executable, "-c", LARGE_BATCH]
    ended = subprocess.run(command, env=clean_env(), capture_output=True, text=True, timeout=HANGS)
    assert ended.stdout.startswith("RuntimeError: Caught RuntimeError in DataLoader worker")
    assert "No space left on device" in ended.stdout
    assert "Data-loader workers need a larger /dev/shm" in ended.stdout
