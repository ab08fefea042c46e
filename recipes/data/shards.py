"""Images that ``lightning-ring pack`` packed, by the loader of `lightning_ring.data`."""

from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
from torch import device as Device

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
from recipes.batch_size import classes_per_batch, even_batch_size, per_rank_batch_size

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
            ``"pxk"``: ``images_per_class`` images of each class that a rank's batch holds.
        scale, flip, jitter: Of training images: smallest and largest share of the area that a crop
            takes, probability to be mirrored, and how far brightness, contrast and saturation are
            changed.
        resize: For evaluation, the shorter side before the centre is cut out.
        seed: Of the order and of the crops.
        find_training_images: Where there is ``unseen``, ``train`` is the third loader of the test,
            uncropped: images for a gallery of all classes.
        num_threads: That decode, on each rank; its share of the cores by default.
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
        resize: int = 256,
        seed: int = 0,
        indices: bool = False,
        find_training_images: bool = False,
        num_threads: int | None = None,
    ) -> None:
        super().__init__()
        if sampler not in ("uniform", "balanced", "pxk"):
            raise ConfigurationError(f"data.sampler={sampler}, expected uniform, balanced or pxk.")
        self.folder = Path(folder)
        self.batch_size = batch_size
        self.num_classes = num_classes
        self.sampler = sampler
        self.images_per_class = images_per_class
        self.train_crop = RandomResizedCrop(image_size, scale=(scale[0], scale[1]), flip=flip)
        self.val_crop = CenterCrop(image_size, resize=resize)
        self.jitter = jitter
        self.seed = seed
        self.indices = indices
        self.find_training_images = find_training_images
        self.num_threads = num_threads

    def shards(self) -> Path:
        """The folder that holds the folders of shards."""
        return self.folder

    def setup(self, stage: str) -> None:
        """Open the shards.

        Raises:
            ConfigurationError: They are not there, or do not have the classes that are expected.
        """
        root = self.shards()
        absent = [split for split in ("train", "val") if not (root / split / MANIFEST).is_file()]
        if absent:
            commands = [f"lightning-ring pack IMAGES/{split} {root}/{split}" for split in absent]
            raise ConfigurationError(
                f"{root.absolute()} holds no packed images in {' and '.join(absent)}. Name another "
                f"folder with data.folder=FOLDER, or pack them: {' && '.join(commands)}"
            )
        self.datasets = {"train": ShardDataset(root / "train")}
        train = self.datasets["train"]
        # a checkpoint brings names of its own
        if stage != "test" and len(train.classes) != self.num_classes:
            raise ConfigurationError(
                f"{train.root} holds {len(train.classes)} classes, but "
                f"data.num_classes={self.num_classes}. Set data.num_classes={len(train.classes)}."
            )
        for split in EVALUATED:
            if (root / split / MANIFEST).is_file():
                self.datasets[split] = ShardDataset(root / split)
        for split in ("val", "test"):
            if split in self.datasets:
                number_as(train.classes, self.datasets[split], f"{train.root} has")
        self.class_names = train.classes

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
        for split, generation in state_dict.get("generations", {}).items() if fitting else ():
            dataset = self.datasets.get(split)
            if dataset is not None and dataset.generation != generation:
                self.datasets[split] = ShardDataset(dataset.root, generation=generation)
        names = state_dict["class_names"]
        for split in ("train", "val", "test"):
            if split in self.datasets:
                number_as(names, self.datasets[split], "the checkpoint was trained on")
        self.class_names = names

    # -- loaders

    def train_dataloader(self) -> Loader:
        sampler = self._train_sampler(self.datasets["train"])
        brightness, contrast, saturation = self.jitter
        return self._loader(
            "train",
            sampler,
            None if isinstance(sampler, PKSampler) else self.rank_batch_size(),
            crop=self.train_crop,
            transform=DeviceTransform(
                brightness=brightness, contrast=contrast, saturation=saturation
            ),
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
        num_images = len(self.datasets[split])
        batch_size = even_batch_size(num_images, self.world_size(), self.rank_batch_size())
        sampler = ShuffledSampler(
            num_images, shuffle=False, remainder="keep", **self._place(self.datasets[split])
        )
        transform = DeviceTransform()
        return self._loader(split, sampler, batch_size, crop=self.val_crop, transform=transform)

    def _train_sampler(self, dataset: ShardDataset) -> OrderedSampler:
        if self.sampler == "pxk":
            present = len(np.unique(dataset.labels))
            return PKSampler(
                dataset.labels,
                classes_per_batch(
                    self.batch_size, self.world_size(), self.images_per_class, present
                ),
                self.images_per_class,
                seed=self.seed,
                **self._place(dataset),
            )
        if len(dataset) < self.batch_size:
            raise ConfigurationError(
                f"data.batch_size={self.batch_size} is more than the {len(dataset)} images of "
                f"{dataset.root}, so an epoch would have no step. Choose a smaller data.batch_size."
            )
        if self.sampler == "balanced":
            return BalancedSampler(dataset.labels, seed=self.seed, **self._place(dataset))
        return ShuffledSampler(
            len(dataset), remainder="drop", seed=self.seed, **self._place(dataset)
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

    def _place(self, dataset: ShardDataset) -> dict[str, Any]:
        rank = self.trainer.global_rank if self.trainer else 0
        of_all = {"world_size": self.world_size(), "fingerprint": dataset.fingerprint}
        return {"rank": rank, **of_all}

    def world_size(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    def rank_batch_size(self) -> int:
        return per_rank_batch_size(self.batch_size, self.world_size())


def number_as(names: list[str], dataset: ShardDataset, whose: str) -> None:
    """Give the classes of ``dataset`` the numbers that they have in ``names``, in place.

    Packing numbers the classes that a folder has, and a class of few images may be missing in one
    of them.

    Args:
        whose: The names, for the error: "X has".

    Raises `ConfigurationError`: an image of ``dataset`` is of another class.
    """
    if dataset.classes == names:
        return
    number = {name: i for i, name in enumerate(names)}
    present = {dataset.classes[label] for label in np.unique(dataset.labels)}
    strange = sorted(present - number.keys())  # a class without images may be any
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
