"""Time from typing a command to the end of the first optimizer step: ``python -m
benchmarks.step.start``.

A small module on two CPU ranks. ``ddp`` and ``ring`` are ``python train.py``; ring goes through
mpirun. ``ringrun`` starts the ranks without a process that imports torch first. The contenders take
turns.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.turns import parser_of

SCRIPT = """
import os, sys, time
import lightning as L
import lightning_ring
from lightning.pytorch.demos.boring_classes import BoringModel

class Model(BoringModel):
    def on_train_batch_end(self, *args):
        if self.trainer.is_global_zero and self.global_step == 1:
            print("first step", time.time() - float(os.environ["STARTED"]), flush=True)

if __name__ == "__main__":
    L.Trainer(strategy=sys.argv[1], devices=2, accelerator="cpu", max_steps=2, logger=False, limit_val_batches=0,
              enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False).fit(Model())
"""
CONTENDERS = {
    "ddp": [sys.executable, "train.py", "ddp"],
    "ring": [sys.executable, "train.py", "ring"],
    "ringrun": [sys.executable, "-m", "lightning_ring.cli.ringrun", "-n", "2", "train.py", "ring"],
}


def seconds_to_first_step(command, folder):
    environ = os.environ | {"STARTED": repr(time.time())}
    said = subprocess.check_output(command, cwd=folder, env=environ, timeout=300, text=True)
    return float(said.partition("first step ")[2].split()[0])


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    seconds = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(SCRIPT)
        for _ in range(rounds + 1):
            for name, command in CONTENDERS.items():
                seconds[name].append(seconds_to_first_step(command, folder))
    for name, measured in seconds.items():
        later = measured[1:]  # the first round reads the packages from disk
        ratio = statistics.median(later) / statistics.median(seconds["ddp"][1:])
        shown = " ".join(f"{value:.1f}" for value in later)
        print(f"{name:8} median {statistics.median(later):5.1f} s, {ratio:.2f} of ddp   ({shown})")


if __name__ == "__main__":
    main()
