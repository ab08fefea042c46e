"""The job of docs/guides/slow-job.md: trains on a folder of photographs, or on the same ones
packed.

python recipes/slow_job.py draw photos
python recipes/slow_job.py train photos                 # slow
lightning-ring pack photos packed
python recipes/slow_job.py train packed --packed        # repaired
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 4032, 3024  # 12 megapixels
PIXELS = 64  # of a side of what the network sees
BATCH_SIZE = 8  # of a rank


def draw(folder: Path, num_images: int, scale: float) -> None:
    """Two classes of equal size: what a shop sends, and what a telephone takes, 12 megapixels."""
    from PIL import Image

    sizes = {"1-shop": (400, 300), "2-telephone": (int(WIDTH * scale), int(HEIGHT * scale))}
    for name, size in sizes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(num_images // 2):
            gray = Image.effect_noise((40, 30), 60).resize(size, Image.Resampling.BICUBIC)
            image = Image.merge("RGB", [gray.rotate(180 * turn) for turn in range(2)] + [gray])
            image.save(folder / name / f"{number:04d}.jpg", quality=90)
    print(f"{folder}: {num_images} photographs")


def folder_loader(folder: Path, rank: int, world_size: int) -> Any:
    """As scripts often do it: each rank reads its own part of the sorted folder."""
    from torch.utils.data import DataLoader, Subset
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    crop, flip = transforms.RandomResizedCrop(PIXELS), transforms.RandomHorizontalFlip()
    transform = transforms.Compose([crop, flip, transforms.ToTensor()])
    photos = ImageFolder(str(folder), transform)
    part = len(photos) // world_size
    mine = Subset(photos, range(rank * part, (rank + 1) * part))
    return DataLoader(mine, BATCH_SIZE, shuffle=True, num_workers=1, persistent_workers=True)


def packed_loader(folder: Path, rank: int, world_size: int) -> Any:
    """Every rank reads everywhere, in an order shuffled over all images; threads decode."""
    from lightning_ring import data

    photos = data.ShardDataset(folder)
    sampler = data.ShuffledSampler(len(photos), rank=rank, world_size=world_size)
    return data.image_loader(
        photos,
        sampler,
        BATCH_SIZE,
        crop=data.RandomResizedCrop(PIXELS),
        transform=data.DeviceTransform(),
        ranks_per_node=world_size,
    )


def train(options: argparse.Namespace) -> None:
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import TQDMProgressBar
    from lightning.pytorch.loggers import TensorBoardLogger
    from torch.nn.functional import cross_entropy
    from torchvision.models import resnet18

    from lightning_ring import RingStrategy
    from lightning_ring.monitor import GapMeter

    class Classifier(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = resnet18(num_classes=2)

        def train_dataloader(self) -> Any:
            loader = packed_loader if options.packed else folder_loader
            return loader(options.folder, self.trainer.global_rank, self.trainer.world_size)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            images, labels = batch
            loss = cross_entropy(self.net(images), labels.long())
            self.log("train/loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    L.seed_everything(0, verbose=False)
    gap = [GapMeter(steps=6, rounds=2)] if options.gap else []
    L.Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy=RingStrategy(timeline=options.timeline),
        use_distributed_sampler=False,  # the loaders know their rank
        max_epochs=options.epochs,
        log_every_n_steps=options.log_every,
        logger=TensorBoardLogger(options.logs, name="packed" if options.packed else "folder"),
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[TQDMProgressBar(), *gap],
    ).fit(Classifier())


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("what", choices=("draw", "train"))
    add("folder", type=Path)
    add("--num-images", type=int, default=128, help="to draw (default: 128)")
    add("--scale", type=float, default=1.0, help="of the large photographs' sides (default: 1)")
    add("--packed", action="store_true", help="the folder is what lightning-ring pack wrote")
    add("--ranks", type=int, default=2)
    add("--epochs", type=int, default=5)
    add("--log-every", type=int, default=4, help="steps (default: 4)")
    add("--logs", default="logs/slow_job", help="for TensorBoard (default: %(default)s)")
    add("--timeline", help="trace.json: also record what every rank did when")
    add("--gap", action="store_true", help="only measure the gap between synthetic and real data")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.what == "train":
        train(options)
        return
    if options.folder.exists():
        raise SystemExit(f"{options.folder} exists. Name a folder that does not, or remove it.")
    draw(options.folder, options.num_images, options.scale)


if __name__ == "__main__":
    main()
