"""Image files for tests: small, drawn from a seed, of every kind that a folder of photos may
hold.
"""

from io import BytesIO

import numpy as np
from PIL import Image

EXIF_ORIENTATION = 0x0112


def photo(seed=0, width=120, height=80):
    """Smooth random colours, so that JPEG changes them by a few levels only."""
    grid = np.random.default_rng(seed).integers(0, 255, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(grid).resize((width, height), Image.Resampling.BICUBIC)


def encode(image, kind="JPEG", **options):
    file = BytesIO()
    image.save(file, kind, **({"quality": 95} if kind == "JPEG" else {}) | options)
    return file.getvalue()


def decode(data):
    image = Image.open(BytesIO(data))
    image.load()
    return image


def image_folder(root, classes=3, images=10):
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
