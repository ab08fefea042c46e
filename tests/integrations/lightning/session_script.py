"""A user's script with several fits in one process. ``session_script.py FOLDER PHASE ...``, say
init, ddp or ring.
"""

import json
import os
import sys
import threading
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_ring  # noqa: F401  registers "ring"
from lightning_ring.job.job import current_job
from tests.process_state import changed, process_state
from tests.trainers import QUIET

FOLDER, PHASES = Path(sys.argv[1]), sys.argv[2:]


def fit(strategy):
    torch.manual_seed(0)
    module = BoringModel()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=3,
        limit_val_batches=1,
        **QUIET,
    )
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    return float(module.layer.weight.detach().double().sum())


def main():
    sums, left, group = [], [], None
    for phase in PHASES:
        before = process_state()
        if phase == "init":
            torch.distributed.init_process_group("gloo")
            group = torch.distributed.group.WORLD
        else:
            sums.append(fit(phase))
        if phase.startswith("ring"):
            found = changed(before, process_state())
            left.append({key: [*map(str, pair)] for key, pair in found.items()})
    if group is not None:
        assert torch.distributed.group.WORLD is group, "the script's own process group was replaced"
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    assert total == 2
    result = {"sums": sums, "left": left, "environment": sorted(os.environ)}
    rank, job = torch.distributed.get_rank(), current_job()
    job.close()
    assert current_job() is None
    result["open"] = [thread.name for thread in threading.enumerate() if "ring" in thread.name]
    (FOLDER / f"{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
