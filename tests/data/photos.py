"""Image files for tests: small, drawn from a seed, of every kind that a folder of photos may
hold.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

EXIF_ORIENTATION = 0x0112


def photo(seed: int = 0, width: int = 120, height: int = 80) -> Image.Image:
    """Smooth random colours, so that JPEG changes them by a few levels only."""
    grid = np.random.default_rng(seed).integers(0, 255, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(grid).resize((width, height), Image.Resampling.BICUBIC)


def encode(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **({"quality": 95} if kind == "JPEG" else {}) | options)
    return file.getvalue()


def decode(data: bytes) -> Image.Image:
    image: Image.Image = Image.open(BytesIO(data))
    image.load()
    return image


def image_folder(root: Path, classes: int = 3, images: int = 10) -> Path:
    """``classes`` folders of ``images`` JPEGs: some above 32 pixels, some below; names that tar
    and CSV dislike.
    """
    for c in range(classes):
        folder = root / f"class {c}" / "more, é"
        folder.mkdir(parents=True)
        for i in range(images):
            width, height = (60, 40) if i % 3 else (30, 24)
            where = folder if i % 2 else folder.parent
            (where / f"photo {i}.v2.jpg").write_bytes(encode(photo(c * images + i, width, height)))
    return root
