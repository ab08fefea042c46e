"""Python imports this at its start where `tests.forked.ranks` put its folder on PYTHONPATH."""

import fork_server

fork_server.become_a_rank_if_it_is_one()
