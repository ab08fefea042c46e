"""Images that ``lightning-ring pack`` packed, by the loader of `lightning_ring.data`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
from torch import device as Device
from torchvision.transforms import v2

from lightning_ring.data import (
    BalancedSampler,
    CenterCrop,
    DeviceTransform,
    Loader,
    PKSampler,
    RandomResizedCrop,
    ShardDataset,
    ShuffledSampler,
    image_loader,
)
from lightning_ring.data.sampling.sampler import OrderedSampler
from lightning_ring.errors import ConfigurationError
from recipes.batch_size import classes_per_batch, per_rank_batch_size
from recipes.data.exact import even_batch_size

MANIFEST = "manifest.json"
EVALUATED = ("val", "test", "unseen")


class Shards(L.LightningDataModule):
    """A folder of packed images: ``train``, ``val``, and if there are such ``test`` and ``unseen``,
    a folder each.

    Batches are ``(images, labels)``, with ``indices`` also each image's position in its folder of
    shards. Without ``test`` the test uses ``val``. The images in ``unseen`` are of classes that are
    not trained on: a second loader of the test, for retrieval. Evaluation counts every image once,
    on any number of ranks.

    Args:
        folder: That holds those folders.
        batch_size: Images of one step over all ranks.
        num_classes: In ``train``; said here, because the model is built before the images are
            looked at.
        image_size: Pixels a side that the model gets.
        sampler: ``"uniform"``: each image once an epoch; ``"balanced"``: each class equally often;
            ``"pxk"``: for triplets, ``images_per_class`` images of each class that a rank's batch
            holds.
        images_per_class: K of P x K.
        scale: Smallest and largest share of an image's area that a training crop takes.
        flip: Probability that a training image is mirrored.
        jitter: How far brightness, contrast and saturation of training images are changed.
        randaugment: Change training images by torchvision's `RandAugment` (Cubuk et al. 2020,
            arXiv:1909.13719).
        mixup: Alpha of MixUp (Zhang et al. 2018, arXiv:1710.09412), for classifiers; 0 leaves it
            out.
        resize: For evaluation, the shorter side before the centre is cut out.
        seed: Of the order and of the crops.
        indices: Give the third part of a batch.
        find_training_images: Where there is ``unseen``, ``train`` is the third loader of the test,
            uncropped: images for a gallery of all classes.
        num_threads: That decode, on each rank; its share of the cores by default.
        packing: How the folders are packed, for the error that says that they are not there.
    """

    def __init__(
        self,
        folder: str,
        batch_size: int,
        num_classes: int,
        image_size: int = 224,
        sampler: Literal["uniform", "balanced", "pxk"] = "uniform",
        images_per_class: int = 4,
        scale: tuple[float, float] = (0.08, 1.0),
        flip: float = 0.5,
        jitter: tuple[float, float, float] = (0.0, 0.0, 0.0),
        randaugment: bool = False,
        mixup: float = 0.0,
        resize: int = 256,
        seed: int = 0,
        indices: bool = False,
        find_training_images: bool = False,
        num_threads: int | None = None,
        packing: str = "lightning-ring pack IMAGES/{split} {folder}/{split}",
    ) -> None:
        super().__init__()
        self.save_hyperparameters("image_size", "resize", logger=False)  # for recipes/identify.py
        if sampler not in ("uniform", "balanced", "pxk"):
            raise ConfigurationError(f"data.sampler={sampler}, expected uniform, balanced or pxk.")
        if mixup and (sampler == "pxk" or indices):
            raise ConfigurationError(
                f"data.mixup={mixup} mixes labels, which a recogniser (data.sampler=pxk, "
                "data.indices=true) cannot train on. Set data.mixup=0, or train a classifier."
            )
        self.folder = Path(folder)
        self.batch_size = batch_size
        self.num_classes = num_classes
        self.sampler = sampler
        self.images_per_class = images_per_class
        self.train_crop = RandomResizedCrop(image_size, scale=(scale[0], scale[1]), flip=flip)
        self.val_crop = CenterCrop(image_size, resize=resize)
        self.jitter = jitter
        self.randaugment = v2.RandAugment() if randaugment else None
        self.mixup = v2.MixUp(alpha=mixup, num_classes=num_classes) if mixup else None
        self.seed = seed
        self.indices = indices
        self.find_training_images = find_training_images
        self.num_threads = num_threads
        self.packing = packing

    def shards(self) -> Path:
        """The folder that holds the folders of shards."""
        return self.folder

    def setup(self, stage: str) -> None:
        """Open the shards.

        Raises:
            ConfigurationError: They are not there, or do not have the classes that are expected.
        """
        self._require("train", "val")
        self.datasets = {"train": ShardDataset(self.shards() / "train")}
        train = self.datasets["train"]
        # a checkpoint brings names of its own
        if stage != "test" and len(train.classes) != self.num_classes:
            raise ConfigurationError(
                f"{train.root} holds {len(train.classes)} classes, but "
                f"data.num_classes={self.num_classes}. Set data.num_classes={len(train.classes)}."
            )
        for split in EVALUATED:
            if (self.shards() / split / MANIFEST).is_file():
                self.datasets[split] = ShardDataset(self.shards() / split)
        for split in ("val", "test"):
            if split in self.datasets:
                number_as(train.classes, self.datasets[split], f"{train.root} has")
        self._name_classes(train.classes)

    def _name_classes(self, names: list[str]) -> None:
        self.class_names = names
        self.class_counts = np.bincount(self.datasets["train"].labels, minlength=len(names))

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        generations = {split: dataset.generation for split, dataset in self.datasets.items()}
        return {"class_names": self.class_names, "generations": generations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Number the classes as the checkpoint does, by their names; Lightning calls it after
        `setup`.

        A training goes on with the images that it had, without those that were appended since.

        Raises:
            ConfigurationError: An image's class is none of the checkpoint's.
            ShardError: The set is another one, which was never appended to as often.
        """
        fitting = self.trainer is not None and self.trainer.state.fn == "fit"
        if fitting:
            for split, generation in state_dict.get("generations", {}).items():
                if split in self.datasets and self.datasets[split].generation != generation:
                    self.datasets[split] = ShardDataset(
                        self.datasets[split].root, generation=generation
                    )
        names = state_dict["class_names"]
        for split in ("train", "val", "test"):
            if split in self.datasets:
                number_as(names, self.datasets[split], "the checkpoint was trained on")
        self._name_classes(names)

    def _require(self, *splits: str) -> None:
        absent = [split for split in splits if not (self.shards() / split / MANIFEST).is_file()]
        if absent:
            commands = " && ".join(
                self.packing.format(split=split, folder=self.shards()) for split in absent
            )
            raise ConfigurationError(
                f"{self.shards().absolute()} holds no packed images in {' and '.join(absent)}. "
                f"Name another folder with data.folder=FOLDER, or pack them: {commands}"
            )

    # -- loaders

    def train_dataloader(self) -> Loader:
        sampler = self._train_sampler(self.rank_batch_size())
        transform = DeviceTransform(
            brightness=self.jitter[0], contrast=self.jitter[1], saturation=self.jitter[2]
        )
        batch_size = None if isinstance(sampler, PKSampler) else self.rank_batch_size()
        return self._loader(
            "train",
            sampler,
            batch_size,
            crop=self.train_crop,
            transform=transform,
            sample_transform=self.randaugment,
            batch_transform=self.mixup,
            drop_last=True,
        )

    def val_dataloader(self) -> Loader:
        return self._evaluation_loader("val")

    def test_dataloader(self) -> list[Loader]:
        splits = ["test" if "test" in self.datasets else "val"]
        if "unseen" in self.datasets:
            splits += ["unseen", *(["train"] if self.find_training_images else [])]
        return [self._evaluation_loader(split) for split in splits]

    def _evaluation_loader(self, split: str) -> Loader:
        dataset = self.datasets[split]
        if len(dataset) < self.world_size():
            raise ConfigurationError(
                f"{dataset.root} holds {len(dataset)} images, which cannot be evaluated on "
                f"{self.world_size()} ranks: each needs at least one. Use fewer ranks, or more "
                "images."
            )
        sampler = ShuffledSampler(
            len(dataset),
            shuffle=False,
            remainder="keep",
            rank=self.rank(),
            world_size=self.world_size(),
            fingerprint=dataset.fingerprint,
        )
        batch_size = even_batch_size(len(dataset), self.world_size(), self.rank_batch_size())
        return self._loader(
            split, sampler, batch_size, crop=self.val_crop, transform=DeviceTransform()
        )

    def _train_sampler(self, rank_batch_size: int) -> OrderedSampler:
        dataset = self.datasets["train"]
        rank, world_size, fingerprint = self.rank(), self.world_size(), dataset.fingerprint
        if self.sampler != "pxk" and len(dataset) < self.batch_size:
            raise ConfigurationError(
                f"data.batch_size={self.batch_size} is more than the {len(dataset)} images of "
                f"{dataset.root}, so an epoch would have no step. Choose a smaller data.batch_size."
            )
        if self.sampler == "uniform":
            return ShuffledSampler(
                len(dataset),
                remainder="drop",
                seed=self.seed,
                rank=rank,
                world_size=world_size,
                fingerprint=fingerprint,
            )
        if self.sampler == "balanced":
            return BalancedSampler(
                dataset.labels,
                seed=self.seed,
                rank=rank,
                world_size=world_size,
                fingerprint=fingerprint,
            )
        return PKSampler(
            dataset.labels,
            classes_per_batch(self.batch_size, world_size, self.images_per_class),
            self.images_per_class,
            seed=self.seed,
            rank=rank,
            world_size=world_size,
            fingerprint=fingerprint,
        )

    def _loader(
        self, split: str, sampler: OrderedSampler, batch_size: int | None, **options: Any
    ) -> Loader:
        return image_loader(
            self.datasets[split],
            sampler,
            batch_size,
            device=self.trainer.strategy.root_device if self.trainer else Device("cpu"),
            with_indices=self.indices,
            num_threads=self.num_threads,
            ranks_per_node=self.trainer.num_devices if self.trainer else 1,
            **options,
        )

    # -- ranks

    def rank(self) -> int:
        return self.trainer.global_rank if self.trainer else 0

    def world_size(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    def rank_batch_size(self) -> int:
        return per_rank_batch_size(self.batch_size, self.world_size())


def number_as(names: list[str], dataset: ShardDataset, whose: str) -> None:
    """Give the classes of ``dataset`` the numbers that they have in ``names``, changing its
    ``labels``.

    Packing numbers the classes that a folder has, and a class of few images may be missing in one
    of them.

    Args:
        whose: The names, for the error: "X has".

    Raises:
        ConfigurationError: An image of ``dataset`` is of another class.
    """
    if dataset.classes == names:
        return
    number = {name: i for i, name in enumerate(names)}
    present = np.unique(dataset.labels).tolist()  # a class without images may be any
    strange = sorted(
        dataset.classes[label] for label in present if dataset.classes[label] not in number
    )
    if strange:
        missing = sorted(set(names) - set(dataset.classes))
        renamed = f" It has no {missing[0]!r}: was a class renamed?" if missing else ""
        raise ConfigurationError(
            f"{dataset.root} holds images of {len(strange)} classes besides the {len(names)} that "
            f"{whose}, such as {strange[0]!r}.{renamed} Give classes the names that they had; "
            "classes that are not trained on belong into the folder unseen."
        )
    numbers = np.array([number.get(name, -1) for name in dataset.classes], dtype=np.int32)
    dataset.labels = numbers[dataset.labels]
    dataset.classes = names
