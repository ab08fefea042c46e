"""What a fit may leave behind in its process: taken before and after, and compared."""

import atexit
import gc
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only


def process_state():
    """Everything process-wide that a library can change and a script can see. File descriptors
    by what they are.
    """
    gc.collect()  # a Trainer lies in cycles: what only it holds is no leak
    known = logging.Logger.manager.loggerDict
    names = [
        name
        for name in known
        if name.startswith("lightning") and not name.startswith("lightning_ring")
    ]
    loggers = [logging.getLogger(), *map(logging.getLogger, names)]
    return {
        "environment": dict(os.environ),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "excepthook": sys.excepthook,
        "exit": sys.exit,
        "exit handlers": atexit._ncallbacks(),
        "torch threads": torch.get_num_threads(),
        "rank": getattr(rank_zero_only, "rank", None),
        "handlers": {
            each.name: (list(each.handlers), list(each.filters), each.level) for each in loggers
        },
        "group": torch.distributed.is_initialized(),
        "files": sorted(_opened()),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "folder": os.getcwd(),
        "path": list(sys.path),
    }


def _opened():
    opened = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            opened.append(os.readlink(entry).split(":")[0])
        except OSError:
            continue  # the folder that is being read
    return opened


def changed(before, after):
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}
