"""The settings that decide the bytes of a packing; the number of workers is not one of them."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ring.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class PackSettings:
    """
    Args:
        size: Shorter side, in pixels, to which larger images are shrunk; 0 leaves all at their
            size.
        shard_mb: Largest shard, in MiB; one image that is larger has a shard of its own.
        quality: JPEG quality (1 to 100) of images that are encoded anew.
        group_by_class: Keep the images of a class together, classes in the order of their numbers.
            Else images are mixed once, the same way every time, so that a reader that streams sees
            all classes.
        upright: Turn images by their EXIF orientation. Else they are as torchvision's `ImageFolder`
            sees them.

    Raises:
        ConfigurationError: A value outside its range.
    """

    size: int = 256
    shard_mb: float = 256
    quality: int = 90
    group_by_class: bool = False
    upright: bool = False

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ConfigurationError(
                f"--size {self.size}: expected pixels of the shorter side, or 0 for no shrinking."
            )
        if not 0 < self.shard_mb <= 2**20:
            raise ConfigurationError(
                f"--shard-mb {self.shard_mb}: expected MiB, above 0 and at most {2**20} (1 TiB)."
            )
        if not 1 <= self.quality <= 100:
            raise ConfigurationError(
                f"--quality {self.quality}: expected a JPEG quality from 1 to 100."
            )

    @property
    def shard_bytes(self) -> int:
        return int(self.shard_mb * 2**20)
