"""``horovod`` for scripts that `python -m lightning_ring.horovod` runs, and for the processes that
they start.

The folder above stands on their ``sys.path``. The names of Horovod's modules lead to those of
`lightning_ring.horovod`.
"""

from __future__ import annotations

from typing import Any, NoReturn

from lightning_ring.horovod.as_horovod.names import lead_names_here

__version__ = "0.28.1"  # whose API this is

lead_names_here()


def run(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        "horovod.run() starts ranks from inside a program, which lightning_ring does not. Write "
        "the function into a script and start it: `ringrun -n 4 python -m lightning_ring.horovod "
        "script.py`."
    )
