"""What a user is told who asks for what cannot work."""

import pytest

from lightning_ring.errors import ConfigurationError


def refused(message):
    """Around code that raises a `ConfigurationError` in which the pattern ``message`` is found."""
    return pytest.raises(ConfigurationError, match=message)
