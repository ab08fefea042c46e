"""``python -m tests.strangers [JOB ...]``: each kind of strangers against each job (or those that
are named), and the seconds a step took.
"""

import sys
import tempfile
from pathlib import Path

from tests import forked
from tests.strangers.attack import KINDS
from tests.strangers.jobs import JOBS, run

for job in sys.argv[1:] or JOBS:
    for kinds in (None, *([kind] for kind in KINDS), []):
        with tempfile.TemporaryDirectory() as folder:
            seconds = run(job, Path(folder), kinds, steps=600)
        named = "nobody" if kinds is None else ", ".join(kinds) or "all"
        print(f"{job:8} {named:17} {1000 * seconds:.1f} ms a step", flush=True)
forked.close()
