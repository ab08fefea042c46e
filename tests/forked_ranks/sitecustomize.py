"""Python imports this at its start where `tests.forked.ranks` put its folder on PYTHONPATH."""

import runpy
from pathlib import Path

import fork_server

# which this one hides
runpy.run_path(str(Path(__file__).parent.with_name("whole_lines") / "sitecustomize.py"))
fork_server.become_a_rank_if_it_is_one()
