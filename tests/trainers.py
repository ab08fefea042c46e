"""A Trainer without what a test does not look at."""

import lightning as L

QUIET = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"), False
)


def quiet_trainer(**arguments):
    """One process on the CPU, unless ``arguments`` say otherwise."""
    return L.Trainer(**({"accelerator": "cpu", "devices": 1, **QUIET} | arguments))
