"""What a process packs: a source into a new set, or to the end of one, and with which settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_ring.data.shards import Manifest
from lightning_ring.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class PackSettings:
    """The settings that decide the bytes of a packing; the number of workers is not one of them.

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


@dataclass(frozen=True)
class PackJob:
    """
    Args:
        classes: Names of classes in the order of their numbers; None: by name, after those of
            ``base``.
        base: The set in ``target`` to which images are appended; None: a new set.
    """

    source: Path
    target: Path
    settings: PackSettings
    classes: Sequence[str] | None = None
    base: Manifest | None = None

    @property
    def state(self) -> Path:
        """The folder, in that of the set, of what is unfinished."""
        return self.target / ".packing"

    @property
    def identity(self) -> dict[str, object]:
        """The same for two commands that may go on with each other's shards."""
        return {"source": str(self.source), **asdict(self.settings)}

    @property
    def generation(self) -> int:
        """The one that will be made."""
        return 0 if self.base is None else self.base.generation + 1

    @property
    def first_classes(self) -> list[str]:
        """Those whose numbers are given."""
        return [] if self.base is None else self.base.classes

    @property
    def first_shard(self) -> int:
        return 0 if self.base is None else len(self.base.shards)
