"""A rank that leaves while messages are under way ends with the exit code of its script."""

import sys

import pytest

from tests.comm import leaving_script
from tests.processes import run

pytestmark = pytest.mark.ranks


def test_exit_codes_are_the_scripts_own(tmp_path):
    script, num_pairs = leaving_script.__file__, len(leaving_script.WAYS)
    ended = run([sys.executable, script, str(tmp_path), str(num_pairs)], timeout=140)
    lines = ended.stdout.splitlines()
    assert len(lines) == num_pairs, ended.stdout
    assert all(line.endswith((": 3 3", "an exception: 1 1")) for line in lines), lines
