"""A disk that takes no more."""

import resource
from contextlib import contextmanager


@contextmanager
def files_of_at_most(num_bytes):
    """Files that this process writes get no longer: what comes behind is an OSError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
