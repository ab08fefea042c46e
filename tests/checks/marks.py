"""Marks on checks, by which `tests.battery.check_names` selects them. They change nothing in the
check.
"""


def by_world_size(check):
    """Its result can depend on the number of ranks: it runs on other numbers of ranks than two
    as well.
    """
    return check


def on_one_rank(check):
    """It needs a job of one rank."""
    return check
