"""``horovod`` for scripts that `python -m lightning_ring.horovod` runs, and for their processes.

The folder above is on their ``sys.path``.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from lightning_ring.horovod.as_horovod import Names

__version__ = "0.28.1"  # whose API this is

if not any(isinstance(finder, Names) for finder in sys.meta_path):
    sys.meta_path.insert(0, Names())


def run(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        "horovod.run() starts ranks from inside a program, which lightning_ring does not. Write "
        "the function into a script and start it: `ringrun -n 4 python -m lightning_ring.horovod "
        "script.py`."
    )
