"""Checks of samplers and loaders under a real Trainer, on real ranks."""

from functools import partial

import lance
import lightning as L
import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_ring.data import (
    BalancedSampler,
    DeviceTransform,
    ImageFolder,
    LanceImages,
    PKSampler,
    RandomResizedCrop,
    ShuffledSampler,
    image_loader,
)
from lightning_ring.errors import ConfigurationError
from tests.checks.models import RANK, SIZE, WORLD, ddp, trainer
from tests.checks.world import raised_by_all
from tests.images import write_folder

LABELS = np.repeat(np.arange(9), [3, 50, 7, 12, 20, 4, 16, 9, 30])


class Recorder(L.LightningModule):
    """Trains one layer; notes each step's samples and loss."""

    def __init__(self, features=1):
        super().__init__()
        self.net = nn.Linear(features, 3)
        self.steps = []

    def training_step(self, batch, batch_idx):
        images, labels, indices = (
            batch if isinstance(batch, (tuple, list)) else (batch.view(-1, 1), batch % 3, batch)
        )
        loss = F.cross_entropy(self.net(images.float().flatten(1)), labels)
        self.steps.append((indices.tolist(), float(loss.detach())))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class Ended(Exception):
    pass


class EndAt(Callback):
    """Saves what there is and ends the run, when batch ``step`` was fetched and before it is
    trained on.
    """

    def __init__(self, step, path):
        self.step = step
        self.path = path

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            raise Ended


def ended(run, module, loader):
    with pytest.raises(Ended):
        run.fit(module, loader)


def check_samplers_in_an_ordinary_dataloader():
    samplers = (
        partial(BalancedSampler, LABELS, seed=2),
        partial(PKSampler, LABELS, 2, 4, seed=2),
        partial(ShuffledSampler, len(LABELS), seed=2),
    )
    data = list(range(len(LABELS)))
    for make in samplers:
        for strategy in ("ring", ddp()):
            module, sampler = Recorder(), make()
            trainer(strategy).fit(module, DataLoader(data, batch_size=8, sampler=sampler))
            expected = []
            for epoch in range(2):
                alone = make(rank=RANK, world_size=SIZE)
                alone.set_epoch(epoch)
                mine = list(alone)
                expected += [mine[i : i + 8] for i in range(0, len(mine), 8)]
            assert [indices for indices, _ in module.steps] == expected
            everyone = WORLD.allgather(expected[0])
            if isinstance(sampler, PKSampler):
                classes = [set(LABELS[indices]) for indices in everyone]
                assert [len(some) for some in classes] == [2] * SIZE
                assert len(set.union(*classes)) == 2 * SIZE


def images(folder, **ranks):
    return loader_of(ImageFolder(folder), **ranks)


def loader_of(source, **ranks):
    return image_loader(
        source,
        ShuffledSampler(len(source), seed=5, **ranks),
        2,
        crop=RandomResizedCrop(8),
        transform=DeviceTransform(brightness=0.3),
        with_indices=True,
        num_threads=2,
        prefetch=3,
    )


def folder_of_images(tmp_path):
    if RANK == 0:
        write_folder(tmp_path / "images", classes=3, images=8, size=(24, 32))
    WORLD.Barrier()
    return tmp_path / "images"


def module():
    torch.manual_seed(1)
    return Recorder(3 * 8 * 8)


def check_killed_in_mid_epoch_it_resumes_exactly(tmp_path):
    folder = folder_of_images(tmp_path)
    whole = module()
    trainer("ring", max_epochs=3).fit(whole, images(folder))
    per_epoch = 24 // (2 * SIZE)
    assert len(whole.steps) == 3 * per_epoch
    for step in (1, per_epoch + per_epoch // 2, 2 * per_epoch):  # the last at the start of an epoch
        begun, path = module(), tmp_path / f"{step}.ckpt"
        ended(trainer("ring", max_epochs=3, callbacks=[EndAt(step, path)]), begun, images(folder))
        resumed = module()
        trainer("ring", max_epochs=3).fit(
            resumed, images(folder), ckpt_path=path, weights_only=False
        )
        assert begun.steps + resumed.steps == whole.steps, step


def check_checkpoints_of_lightnings_own_callback_resume_exactly(tmp_path):
    folder = folder_of_images(tmp_path)
    for name, every in {
        "steps": {"every_n_train_steps": 1},
        "epochs": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
    }.items():
        whole = module()
        saving = ModelCheckpoint(tmp_path / name, filename="{step}", save_top_k=-1, **every)
        trainer("ring", max_epochs=2, callbacks=[saving], enable_checkpointing=True).fit(
            whole, images(folder)
        )
        for path in sorted((tmp_path / name).glob("*.ckpt")):
            done = int(path.stem.split("=")[1])
            resumed = module()
            trainer("ring", max_epochs=2).fit(
                resumed, images(folder), ckpt_path=path, weights_only=False
            )
            assert resumed.steps == whole.steps[done:], path


def check_it_resumes_on_another_number_of_ranks(tmp_path):
    folder = folder_of_images(tmp_path)
    step, path = 24 // (2 * SIZE) // 2, tmp_path / "ranks.ckpt"
    begun = module()
    ended(trainer("ring", max_epochs=3, callbacks=[EndAt(step, path)]), begun, images(folder))
    alone = module()
    run = trainer("auto", devices=1, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    run.fit(alone, images(folder, rank=0, world_size=1), ckpt_path=path, weights_only=False)
    seen = WORLD.allgather([indices for indices, _ in begun.steps])
    before = [
        index
        for some in zip(*seen, strict=True)
        for pair in zip(*some, strict=True)
        for index in pair
    ]
    order = [index for indices, _ in alone.steps for index in indices]
    expected, sampler = [], ShuffledSampler(24, seed=5, rank=0, world_size=1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        expected += list(sampler)
    assert before + order == expected


def check_a_lance_data_set_that_has_grown_is_resumed_at_its_version(tmp_path):
    folder = ImageFolder(folder_of_images(tmp_path))
    uri, path = tmp_path / "photos.lance", tmp_path / "half.ckpt"

    def append():
        if RANK == 0:
            table = pa.table({"image": folder.read_many(range(24)), "label": folder.labels})
            lance.write_dataset(
                table, uri, mode="append" if uri.exists() else "create", max_rows_per_file=10
            )
        WORLD.Barrier()

    def fit(version, **options):
        trained = module()
        photos = LanceImages(lance.dataset(uri, version=version))
        trainer("ring", max_epochs=2).fit(trained, loader_of(photos), weights_only=False, **options)
        return trained

    append()
    from_files = module()
    trainer("ring", max_epochs=2).fit(from_files, images(folder.root))
    begun, photos = module(), LanceImages(lance.dataset(uri))
    ended(trainer("ring", max_epochs=2, callbacks=[EndAt(3, path)]), begun, loader_of(photos))
    append()
    with raised_by_all(ConfigurationError, "saved over the images 'version 1, "):
        fit(None, ckpt_path=path)
    assert begun.steps + fit(1, ckpt_path=path).steps == from_files.steps
