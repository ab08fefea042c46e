"""Mutated files and messages raise documented errors only, and cost little."""

import pytest

from tests.mutations import PARSERS, failures


@pytest.mark.parametrize("name", PARSERS)
def test_mutations_are_refused_or_read(name):
    assert list(failures(name, 1000)) == []
