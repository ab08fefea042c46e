"""What one process packs: a source, or a part of it, into a new set or to the end of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lightning_ring.data.packing.settings import PackSettings
from lightning_ring.data.packing.shard_writer import shard_name
from lightning_ring.data.sets.lock import PACKING
from lightning_ring.data.shards.manifest import Manifest
from lightning_ring.errors import ConfigurationError


@dataclass(frozen=True)
class PackJob:
    """
    Args:
        classes: Names of classes in the order of their numbers; None: by name, after those that the set has.
        append: Add to the set in ``target``, if there is one.
        prefix: Put before the name of every image.
        keep_known: Images that the set has stay as they are there, also where the source has another class or file.
        restore: Append images that were deleted, too.
        part, parts: This process packs part number ``part`` (from 0) of ``parts``; the last to end makes the set.
        generation: The one that will be made; ``first_shard`` and ``first_key`` are its first new numbers.
    """

    source: Path
    target: Path
    settings: PackSettings
    classes: Sequence[str] | None = None
    append: bool = False
    prefix: str = ""
    keep_known: bool = False
    restore: bool = False
    part: int = 0
    parts: int = 1
    generation: int = 0
    first_shard: int = 0
    first_key: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.part < self.parts:
            raise ConfigurationError(f"part {self.part + 1} of {self.parts}: expected 1 to {self.parts}.")

    @property
    def state(self) -> Path:
        """The folder of what is unfinished."""
        return self.state_of(self.part)

    def state_of(self, part: int) -> Path:
        state = self.target / PACKING
        return state if self.parts == 1 else state / f"part-{part + 1}-of-{self.parts}"

    @property
    def identity(self) -> dict[str, object]:
        """The same for two commands that may go on with each other's shards."""
        own = {"prefix": self.prefix, "keep_known": self.keep_known, "restore": self.restore}
        return {"source": str(self.source), **asdict(self.settings), **{name: own[name] for name in own if own[name]}}

    def shard_name(self, number: int) -> str:
        """Of this part's shard ``number``; parts write into one folder."""
        return shard_name(self.first_shard + number, None if self.parts == 1 else self.part + 1)

    def positions(self, num: int) -> range:
        """Which of ``num`` images this part packs."""
        return range(num * self.part // self.parts, num * (self.part + 1) // self.parts)

    def after(self, base: Manifest | None) -> PackJob:
        """This job with the numbers of a generation that follows ``base``."""
        if base is None:
            return self
        return replace(
            self,
            generation=base.generation + 1,
            first_shard=base.free_shard,
            first_key=base.free_key,
        )
