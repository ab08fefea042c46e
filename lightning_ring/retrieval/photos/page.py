"""One HTML page, which needs no network, of photographs and what was found for them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from io import BytesIO
from pathlib import Path

from PIL import Image

from lightning_ring.data.decoding import decode_rgb
from lightning_ring.host.file_names import printable
from lightning_ring.retrieval.photos.index import Found

SIDE = 220  # pixels of a picture on the page

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 15px/1.4 system-ui, sans-serif; }}
body {{ margin: 2rem auto; max-width: 90rem; padding: 0 1.5rem; }}
h1 {{ font-size: 1.4rem; margin-bottom: .2rem; }}
p {{ margin-top: 0; color: GrayText; overflow-wrap: anywhere; }}
section {{ display: flex; flex-wrap: wrap; gap: 1rem; padding: 1.2rem 0; border-top: 1px solid #8886; }}
figure {{ margin: 0; width: 12rem; }}
figure.query {{ padding-right: 1rem; border-right: 2px solid #8886; }}
img {{ display: block; width: 12rem; height: 12rem; object-fit: contain; background: #8882; border-radius: 6px; }}
figcaption {{ padding-top: .4rem; overflow-wrap: anywhere; }}
.file {{ display: block; font-size: .8rem; color: GrayText; }}
meter {{ width: 100%; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{summary}</p>
{sections}
</body>
</html>
"""


def page_of(photos: Sequence[Path], found: Sequence[Sequence[Found]], num_indexed: int, checkpoint: str) -> str:
    """Each of ``photos`` beside the photographs that were found for it, the most similar first."""
    sections = []
    for photo, others in zip(photos, found, strict=True):
        figures = [_figure(photo, photo.name, "photograph", "", "query")]
        for number, other in enumerate(others, start=1):
            text = f"{number}. {other.label or other.file.name}"
            share = max(0.0, other.similarity)
            meter = f'<meter min="0" max="1" value="{share:.3f}"></meter> similarity {other.similarity:.3f}'
            figures.append(_figure(other.file, other.file.name, text, meter, "found"))
        sections.append("<section>\n" + "\n".join(figures) + "\n</section>")
    title = f"Nearest of {num_indexed:,} photographs"
    page = PAGE.format(title=title, summary=f"Model: {escape(checkpoint)}", sections="\n".join(sections))
    return printable(page)


def _figure(file: Path, name: str, text: str, more: str, kind: str) -> str:
    return (
        f'<figure class="{kind}"><img src="{_data(file)}" alt="{escape(name)}"><figcaption>{escape(text)} {more}'
        f'<span class="file">{escape(name)}</span></figcaption></figure>'
    )


def _data(file: Path) -> str:
    """A small JPEG of ``file``, as the model sees it, as an address; empty where it has gone since it was indexed."""
    try:
        image = Image.fromarray(decode_rgb(file.read_bytes()))
    except (OSError, ValueError, MemoryError):
        return ""
    scale = SIDE / max(image.size)
    small = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
    data = BytesIO()
    small.save(data, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()
