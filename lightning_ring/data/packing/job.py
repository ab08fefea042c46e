"""What a process packs: a source into a new set, or to the end of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lightning_ring.data.packing.settings import PackSettings
from lightning_ring.data.shards.manifest import Manifest

PACKING = ".packing"
"""The folder, in that of the set, of what is unfinished."""


@dataclass(frozen=True)
class PackJob:
    """
    Args:
        classes: Names of classes in the order of their numbers; None: by name, after those that the
            set has.
        append: Add to the set in ``target``, if there is one.
        generation: The one that will be made; ``first_shard`` and ``first_key`` are its first new
            numbers.
    """

    source: Path
    target: Path
    settings: PackSettings
    classes: Sequence[str] | None = None
    append: bool = False
    generation: int = 0
    first_shard: int = 0
    first_key: int = 0

    @property
    def state(self) -> Path:
        return self.target / PACKING

    @property
    def identity(self) -> dict[str, object]:
        """The same for two commands that may go on with each other's shards."""
        return {"source": str(self.source), **asdict(self.settings)}

    def after(self, base: Manifest | None) -> PackJob:
        """This job with the numbers of the generation that follows ``base``."""
        if base is None:
            return self
        return replace(
            self,
            generation=base.generation + 1,
            first_shard=len(base.shards),
            first_key=base.samples,
        )
