"""Transforms of samples: the same pictures in any threads and ranks; random states stay as they
are.
"""

import random
import threading

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightning_ring.data.loading.augment import _DRAWING, OwnGenerator
from lightning_ring.errors import SampleError
from tests.data.augment.loading import generators_untouched, images, make
from tests.refusals import refused

v2 = pytest.importorskip("torchvision.transforms.v2")

TRANSFORMS = {
    "RandAugment": v2.RandAugment(),
    "any of them": v2.RandomChoice([v2.AutoAugment(), v2.AugMix(), v2.TrivialAugmentWide()]),
    "many": v2.Compose(
        [
            v2.RandomOrder([v2.RandomPhotometricDistort(), v2.RandomInvert()]),
            v2.RandomApply([v2.RandomPerspective()]),
            v2.RandomRotation(20),
            v2.GaussianBlur(3),
            v2.RandomErasing(0.5),
        ]
    ),
    "a function": lambda image: (
        (image + torch.randn_like(image.float()) * 9).clamp(0, 255).to(torch.uint8)
    ),
}


def of_albumentations():
    albumentations = pytest.importorskip("albumentations")
    noise = [albumentations.GaussNoise(p=1), albumentations.CoarseDropout(p=1)]
    changes = [albumentations.HorizontalFlip(), albumentations.RandomBrightnessContrast()]
    return albumentations.Compose(
        [*changes, albumentations.OneOf(noise), albumentations.ToTensorV2()]
    )


def of_kornia():
    kornia = pytest.importorskip("kornia.augmentation")
    sequence = kornia.ImageSequential(
        kornia.ColorJiggle(0.4, 0.4, 0.4, 0.1), kornia.RandomAffine(20.0)
    )
    return lambda image: (sequence(image[None].float() / 255)[0] * 255).round().to(torch.uint8)


@pytest.fixture(params=[*TRANSFORMS, "Albumentations", "kornia"])
def transform(request):
    if request.param in TRANSFORMS:
        return TRANSFORMS[request.param]
    return of_albumentations() if request.param == "Albumentations" else of_kornia()


def test_pictures_depend_on_the_position_alone(folder, transform):
    with generators_untouched():
        whole = images(make(folder, sample_transform=transform, num_threads=1))
        assert (whole != images(make(folder))).flatten(1).any(1).float().mean() > 0.5
        assert torch.equal(
            images(make(folder, sample_transform=transform, num_threads=3, batch_size=20)), whole
        )
        parts = [images(make(folder, rank, 3, 2, sample_transform=transform)) for rank in range(3)]
        assert torch.equal(torch.stack(parts, 1).flatten(0, 1), whole)
        begun = make(folder, sample_transform=transform)
        iterator = iter(begun)
        next(iterator), next(iterator)
        resumed = make(folder, sample_transform=transform, batch_size=3)
        resumed.load_state_dict(begun.state_dict())
        assert torch.equal(images(resumed), whole[8:])
        del iterator
        begun.sampler.set_epoch(1)
        assert not torch.equal(images(begun), whole)


def test_every_function_of_torch_that_takes_a_generator_is_given_one():
    takers = {
        schema.name.removeprefix("aten::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::")
        and any(argument.name == "generator" for argument in schema.arguments)
    }
    takers -= {"_fused_dropout", "rrelu", "rrelu_", "random"}  # Python can give these none
    known = {function.__name__ for function in _DRAWING}
    assert {name for name in takers if hasattr(torch, name) or hasattr(Tensor, name)} <= known
    own, seen = OwnGenerator(), []
    with generators_untouched():
        for _ in range(2):
            own.generator.manual_seed(5)
            with own:
                beta = torch.distributions.Beta(torch.tensor(0.3), torch.tensor(0.4)).sample()
                like = torch.rand_like(torch.empty(2))
                normal, drawn = torch.empty(()).normal_(), torch.multinomial(like, 1)[0]
                seen.append(torch.stack([beta, *like, normal, drawn]))
    assert torch.equal(seen[0], seen[1])


def uses_random(image):
    return image.flip(-1) if random.random() < 0.5 else image


def uses_numpy(image):
    return image.roll(int(np.random.randint(8)), -1)


def drops_out(image):
    return functional.dropout(image.float()).to(torch.uint8)


def fails(image):
    raise KeyError("no such colour")


@pytest.mark.parametrize(
    ("transform", "shared"),
    [
        (uses_random, "Python's random"),
        (uses_numpy, "numpy.random"),
        (drops_out, "torch's own generator"),
    ],
)
def test_generators_that_threads_share_are_an_error(folder, transform, shared):
    with (
        generators_untouched(),
        refused(
            f"draws from {shared}, which all threads share.*torch's DataLoader",
        ),
    ):
        images(make(folder, sample_transform=transform))


@pytest.mark.parametrize(
    ("transform", "error"),
    [
        (fails, r"\.jpg: sample_transform fails raised KeyError\('no such colour'\)"),
        (
            v2.Resize(8),
            r"Resize made 3 x 8 x 8 of uint8, expected 3 x 32 x 32 of uint8 as it got. `crop` "
            r"sets the size",
        ),
        (
            v2.ToDtype(torch.float32),
            "ToDtype made 3 x 32 x 32 of float32, expected .* `transform`, which runs after",
        ),
        (lambda image: None, "made a NoneType, expected 3 x 32 x 32 of uint8"),
    ],
)
def test_what_makes_no_image_is_named(folder, transform, error):
    for on_error in ("raise", "skip"):  # a transform's error is no broken image
        with pytest.raises(SampleError, match=error):
            images(make(folder, sample_transform=transform, on_error=on_error))


def test_what_cannot_be_copied_is_an_error(folder):
    class Locked:
        def __init__(self):
            self.lock = threading.Lock()

        def __call__(self, image):
            return image

    with refused("Locked cannot be copied for each thread"):
        images(make(folder, sample_transform=Locked()))
