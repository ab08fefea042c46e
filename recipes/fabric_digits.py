"""The recipe of the digits in a loop of Fabric's: what `recipes/train.py` trains by default,
without a Trainer.

python recipes/fabric_digits.py --devices 2            # or mpirun -n 2, srun, torchrun, ringrun
python recipes/fabric_digits.py --devices 2 --strategy ring_sharded
"""

import argparse
import sys
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

if not __package__:  # run as a script: make `recipes` importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import lightning_ring  # noqa: F401  registers "ring"
from lightning_ring.optim import exclude_bias_and_norm
from lightning_ring.schedules import WarmupLR, warmup_cosine
from recipes.batch_size import per_rank_batch_size
from recipes.data.digits import Digits
from recipes.data.tensors import whole_batch
from recipes.models import SmallResNet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="auto", help="ranks, where no launcher started them")
    parser.add_argument("--strategy", default="ring", help="ring, ring_sharded, or ddp to compare")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--logs", default="logs", help="folder of the log and the checkpoint")
    options = parser.parse_args()
    fabric = Fabric(
        accelerator="cpu",
        strategy=options.strategy,
        devices=options.devices,
        loggers=CSVLogger(options.logs, name="fabric_digits"),
    )
    fabric.launch()
    fabric.seed_everything(1, verbose=False)
    data = Digits(batch_size=64)
    data.setup("fit")
    size = per_rank_batch_size(64, fabric.world_size)
    train = data.datasets["train"]
    images = DataLoader(train, size, shuffle=True, drop_last=True, collate_fn=whole_batch)
    loader = cast("DataLoader[Any]", fabric.setup_dataloaders(images))

    network = SmallResNet(in_channels=1, num_classes=10, widths=[16, 32, 64], blocks=1)
    groups = exclude_bias_and_norm(network, 5e-4)
    sgd = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = WarmupLR(sgd, warmup_cosine(total=options.epochs * len(loader), warmup=10))
    model, optimizer = fabric.setup(network, sgd)
    for _ in range(options.epochs):
        model.train()
        for batch, labels in loader:
            fabric.backward(cross_entropy(model(batch), labels))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    model.eval()
    pictures, labels = data.datasets["test"].tensors
    share = slice(fabric.global_rank, None, fabric.world_size)
    with torch.no_grad():
        right = (model(pictures[share]).argmax(1) == labels[share]).sum()
    accuracy = int(cast(Tensor, fabric.all_reduce(right, reduce_op="sum"))) / len(labels)
    fabric.save(Path(options.logs) / "fabric_digits.ckpt", {"model": model, "optimizer": optimizer})
    fabric.print(f"test accuracy {accuracy:.4f} on {len(labels)} images")


if __name__ == "__main__":
    main()
