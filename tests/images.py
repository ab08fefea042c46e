"""Photo-like JPEGs for tests: smooth colours, edges and a little noise, the same for the same
seed.
"""

import numpy as np
from PIL import Image


def picture(seed, height, width):
    generator = np.random.default_rng(seed)
    coarse = (generator.random((max(2, height // 24), max(2, width // 24), 3)) * 255).astype(
        np.uint8
    )
    smooth = np.asarray(
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32
    )
    return (smooth + generator.normal(0, 3, smooth.shape)).clip(0, 255).astype(np.uint8)


def write_folder(root, *, classes=3, images=7, size=(48, 64)):
    """``root/c0/0.jpg`` and so on."""
    for number in range(classes):
        folder = root / f"c{number}"
        folder.mkdir(parents=True)
        for i in range(images):
            Image.fromarray(picture(number * 1000 + i, *size)).save(folder / f"{i}.jpg", quality=90)
    return root
