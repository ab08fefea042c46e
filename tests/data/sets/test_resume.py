"""A checkpoint names the generation that it was saved at, and goes on with it, or with the newest."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_ring.data import (
    BalancedSampler,
    CenterCrop,
    ImageFolder,
    Mixture,
    MixtureSampler,
    PKSampler,
    ShardDataset,
    ShuffledSampler,
    image_loader,
)
from lightning_ring.data.sets.change import delete_images, relabel_images
from lightning_ring.data.sets.prune import prune_set
from lightning_ring.errors import ConfigurationError, ShardError
from lightning_ring.integrations.lightning.same_images import check_same_images
from tests.data.sets.daily import draw, pack
from tests.thread_ranks import run_ranks

NAMES = {f"{kind}/{i}.jpg": 10 * i + len(kind) for kind in ("bird", "cat", "horse") for i in range(8)}
SAMPLERS: dict[str, Any] = {
    "shuffled": lambda photos, **ranks: ShuffledSampler(len(photos), fingerprint=photos.fingerprint, **ranks),
    "balanced": lambda photos, **ranks: BalancedSampler(photos.labels, fingerprint=photos.fingerprint, **ranks),
    "p x k": lambda photos, **ranks: PKSampler(photos.labels, 2, 2, fingerprint=photos.fingerprint, **ranks),
}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    pack(draw(tmp_path / "src", NAMES), tmp_path / "dst")
    return tmp_path / "dst"


def change(target: Path) -> None:
    draw(target.parent / "src", {f"{kind}/{i}.jpg": i for kind in ("ant", "cat") for i in range(10, 20)})
    pack(target.parent / "src", target)
    delete_images(target, names=["cat/1.jpg", "horse/4.jpg"])
    relabel_images(target, {"cat/2.jpg": "bird"})


def loader(photos: ShardDataset, kind: str, given: bool = False, **options: Any) -> Any:
    def sampler(source: ShardDataset) -> Any:
        return SAMPLERS[kind](source, rank=0, world_size=1)

    made = sampler(photos) if given else sampler
    size = None if kind == "p x k" else 4
    return image_loader(photos, made, size, crop=CenterCrop(8, resize=8), transform=None, with_indices=True, **options)


def seen(batches: Any, photos: ShardDataset) -> list[tuple[list[str], list[int], torch.Tensor]]:
    return [([photos.name(i) for i in indices], labels.tolist(), images.clone()) for images, labels, indices in batches]


@pytest.mark.parametrize("kind", SAMPLERS)
def test_it_goes_on_exactly_with_the_generation_that_it_was_saved_at(target: Path, kind: str) -> None:
    old = ShardDataset(target)
    whole = seen(loader(old, kind), old)
    began = loader(old, kind)
    iterator = iter(began)
    head = seen((next(iterator) for _ in range(2)), old)
    state = began.state_dict()
    iterator.close()
    assert state["generation"] == 0
    change(target)
    photos = ShardDataset(target)
    assert photos.generation == 3
    resumed = loader(photos, kind)
    resumed.load_state_dict(state)
    assert resumed.maker.source.generation == 0
    for (names, labels, images), (also, others, same) in zip(head + seen(resumed, old), whole, strict=True):
        assert (names, labels) == (also, others)
        assert torch.equal(images, same)
    assert resumed.state_dict()["generation"] == 0

    with pytest.raises(
        ConfigurationError, match=r"saved at generation 0 .* reads generation 3\. .*resume_at=\"newest\""
    ):
        loader(photos, kind, given=True).load_state_dict(state)
    exact = loader(ShardDataset(target, generation=0), kind, given=True)
    exact.load_state_dict(state)
    assert len(seen(exact, old)) == len(whole) - 2

    prune_set(target)
    with pytest.raises(ShardError, match="has no generation 0: it has 3"):
        loader(photos, kind).load_state_dict(state)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_it_goes_on_with_the_newest_at_the_same_position(target: Path, kind: str, given: bool, caplog: Any) -> None:
    began = loader(ShardDataset(target), kind)
    iterator = iter(began)
    for _ in range(2):
        next(iterator)
    state = began.state_dict()
    iterator.close()
    change(target)
    photos = ShardDataset(target)
    whole = seen(loader(photos, kind), photos)
    resumed = loader(photos, kind, given, resume_at="newest")
    resumed.load_state_dict(state)
    assert "saved at generation 0 of the images, and training goes on with generation 3" in caplog.text
    length, rest = len(resumed), seen(resumed, photos)
    assert length == len(rest) + 2
    if kind == "p x k":  # passes over more classes begin at other positions
        assert abs(length - len(whole)) <= 1
    else:
        assert [names for names, _, _ in rest] == [names for names, _, _ in whole[2:]]  # the position in the new order
    assert len(seen(resumed, photos)) == len(whole)
    assert resumed.state_dict()["generation"] == 3


def test_a_smaller_newest_generation_ends_the_epoch(target: Path) -> None:
    began = loader(ShardDataset(target), "shuffled")
    iterator = iter(began)
    for _ in range(4):
        next(iterator)
    state = began.state_dict()
    iterator.close()
    delete_images(target, where="class_name != 'cat'")
    resumed = loader(ShardDataset(target), "shuffled", resume_at="newest")
    resumed.load_state_dict(state)
    assert (len(resumed), list(resumed)) == (4, [])  # Lightning has counted four
    resumed.sampler.set_epoch(1)
    assert len(list(resumed)) == 2


def test_another_kind_of_sampler_is_refused_and_labels_that_were_set_are_not_lost(target: Path) -> None:
    state = loader(ShardDataset(target), "shuffled").state_dict()
    change(target)
    photos = ShardDataset(target)
    with pytest.raises(ConfigurationError, match="kind 'shuffled', but this one has 'balanced, beta=1'"):
        loader(photos, "balanced", resume_at="newest").load_state_dict(state)
    balanced = loader(photos, "balanced").state_dict() | {"generation": 0}
    other_beta = BalancedSampler(photos.labels, beta=0.5, rank=0, world_size=1)
    with pytest.raises(ConfigurationError, match=r"kind 'balanced, beta=1', but this one has 'balanced, beta=0\.5'"):
        other_beta.load_state_dict(balanced["sampler"], other_data=True)
    photos.labels = photos.labels + 1
    with pytest.raises(ConfigurationError, match="were set by this program, for generation 3"):
        loader(photos, "shuffled").load_state_dict(state)
    with pytest.raises(ConfigurationError, match="expected 'saved' or 'newest'"):
        loader(photos, "shuffled", resume_at="oldest")


def test_ranks_that_opened_different_generations_are_told(target: Path) -> None:
    old = ShardDataset(target)
    change(target)
    sets = [old, ShardDataset(target), ShardDataset(target)]

    def check(comm: Any, photos: list[ShardDataset]) -> str:
        try:
            check_same_images(loader(photos[comm.rank], "shuffled"), comm)
        except ConfigurationError as error:
            return str(error)
        return "the same"

    told = run_ranks(3, lambda comm: check(comm, sets))
    assert len(set(told)) == 1
    assert "ranks read different images: rank 0 reads generation 0" in told[0]
    assert "rank 1 reads generation 3" in told[0]
    assert run_ranks(3, lambda comm: check(comm, sets[1:2] * 3)) == ["the same"] * 3


def mixed(mixture: Mixture, rank: int, world_size: int, batch_size: int, **options: Any) -> Any:
    def sampler(source: Mixture) -> MixtureSampler:
        ranks = {"rank": rank, "world_size": world_size}
        return MixtureSampler(source.sizes, [2, 1, 1], num_samples=96, fingerprint=source.fingerprint, **ranks)

    crop = CenterCrop(8, resize=8)
    return image_loader(mixture, sampler, batch_size, crop=crop, transform=None, with_indices=True, **options)


def test_a_filtered_mixture_of_sets_that_grew_goes_on_exactly_on_other_ranks(target: Path) -> None:
    other = target.parent / "other"
    pack(draw(target.parent / "src2", {f"ant/{i}.jpg": 300 + i for i in range(9)}), other)
    sets = [target, other]

    def opened() -> Mixture:
        filtered = [ShardDataset(root, where="not endswith(name, '/3.jpg')") for root in sets]
        return Mixture([*filtered, ImageFolder(target.parent / "src2")])

    def seen_by(loaders: list[Any], batches: int | None = None) -> list[list[str]]:
        """Names in each step of all ranks."""
        steps = zip(*(itertools.islice(iter(one), batches) for one in loaders), strict=True)
        name = loaders[0].maker.source.name
        return [sorted(name(i) for _, _, indices in step for i in indices) for step in steps]

    whole = seen_by([mixed(opened(), 0, 1, 12)])
    two = [mixed(opened(), rank, 2, 6) for rank in range(2)]
    head = seen_by(two, 3)
    state = two[0].state_dict()
    assert state["generation"] == [0, 0, None]
    delete_images(other, where="name < 'ant/4.jpg'")
    change(target)
    three = [mixed(opened(), rank, 3, 4) for rank in range(3)]
    assert three[0].generations.generation == [3, 1, None]
    for one in three:
        one.load_state_dict(state)
    assert head + seen_by(three) == whole
    assert three[0].state_dict()["generation"] == [0, 0, None]

    newest = mixed(opened(), 0, 1, 12, resume_at="newest")
    newest.load_state_dict(state)
    assert len(list(newest)) == 5
    assert newest.state_dict()["generation"] == [3, 1, None]
    with pytest.raises(ConfigurationError, match="fingerprint"):
        mixed(Mixture(opened().sources[::-1]), 0, 1, 12).load_state_dict(state)
    with pytest.raises(ConfigurationError, match=r"reads generation \[3, 1, None\]\. .*open its sets at those"):
        image_loader(
            opened(), MixtureSampler([1, 2, 3], [1, 1, 1]), 4, crop=CenterCrop(8), transform=None
        ).load_state_dict(state)
    alone = loader(ShardDataset(target), "shuffled")
    with pytest.raises(ConfigurationError, match="kind"):
        alone.load_state_dict(state)


class Remembers(L.LightningModule):
    def __init__(self, target: Path, stop: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.target, self.stop = target, stop
        self.names: list[str] = []

    def train_dataloader(self) -> Any:
        self.loader = loader(ShardDataset(self.target), "shuffled")
        return self.loader

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        source = self.loader.maker.source
        self.names += [source.name(i) for i in batch[2]]
        if self.stop and batch_idx == 2:
            self.trainer.save_checkpoint(self.target.parent / "mid.ckpt")
            self.trainer.should_stop = True
            self.trainer.fit_loop.epoch_loop.max_steps = 3
        return self.layer(torch.ones(1)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(model: Remembers, ckpt_path: Path | None = None, strategy: str = "auto") -> list[str]:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", devices=1, strategy=strategy, **quiet)
    trainer.fit(model, ckpt_path=ckpt_path, weights_only=False)
    return model.names


def test_lightning_resumes_a_training_at_its_generation(target: Path) -> None:
    whole = fit(Remembers(target, stop=False))
    fit(Remembers(target, stop=True))
    saved = torch.load(target.parent / "mid.ckpt", weights_only=False)
    (state,) = saved["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert state["generation"] == 0
    change(target)
    done = state["batches"] * 4
    assert fit(Remembers(target, stop=False), target.parent / "mid.ckpt") == whole[done:]
