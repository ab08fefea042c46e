"""The catalogue as packed images: drawn, photographed and packed by the first run that needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_ring.data.packing.run import pack
from lightning_ring.data.packing.settings import PackSettings
from lightning_ring.host.cores import available_cores
from recipes.catalogue.make import SPLITS, Catalogue, make_catalogue
from recipes.data.shards import MANIFEST, Shards


class CatalogueShards(Shards):
    """Makes the catalogue in ``folder``, and its ``shards`` inside, unless it is there.

    Args:
        folder: Where to.
        drawing: What, as arguments of `recipes.catalogue.make.Catalogue`.
        options: As in `Shards`.
    """

    def __init__(self, folder: str, drawing: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(folder, **options)
        self.catalogue = Catalogue(**(drawing or {}))

    def shards(self) -> Path:
        return self.folder / "shards"

    def prepare_data(self) -> None:
        if not self.folder.exists():
            rank_zero_info(f"drawing and photographing the catalogue in {self.folder}")
        make_catalogue(self.folder, self.catalogue)
        for split in SPLITS:
            # Photographs are copied byte for byte: they are smaller than the size that packing
            # shrinks to.
            if not (self.shards() / split / MANIFEST).exists():
                pack(
                    self.folder / split,
                    self.shards() / split,
                    PackSettings(),
                    available_cores(),
                    _silent,
                )


def _silent(done: int, total: int, left_out: int) -> None:
    """Packing takes a second; it needs no progress bar."""
