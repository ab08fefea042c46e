"""An index of photographs: their embeddings and where they are."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from lightning_ring.data.packing.files import whole_file
from lightning_ring.data.packing.listing import EXTENSIONS, LeftOut, walk
from lightning_ring.errors import ConfigurationError
from lightning_ring.retrieval.neighbours import search
from lightning_ring.retrieval.photos.embedder import PhotoEmbedder
from lightning_ring.retrieval.rerank import rerank

FORMAT = "lightning_ring photographs 2"
RERANKED = 1000  # nearest photographs that are put into another order


@dataclass(frozen=True, slots=True)
class Found:
    """A photograph that was found, and its cosine similarity to the query."""

    file: Path
    label: str
    similarity: float


@dataclass(frozen=True, slots=True)
class PhotoIndex:
    """Embeddings of unit length ``[n, embedding_size]`` of the photographs ``files`` below ``root``.

    Attributes:
        checkpoint, class_path, digest: Of the model that embedded them, as of `PhotoEmbedder`.
        size, resize: Of its crop.
    """

    embeddings: Tensor
    files: list[str]
    root: str
    checkpoint: str
    class_path: str
    digest: str
    size: int
    resize: int

    @classmethod
    def build(
        cls, model: PhotoEmbedder, folder: Path, progress: Callable[[int, int], object] = lambda done, total: None
    ) -> tuple[PhotoIndex, dict[str, str]]:
        """Embed all photographs below ``folder``. Returns the index, and the reasons for those left out, by path.

        Raises:
            ConfigurationError: There is no photograph that can be read, or an embedding is not finite.
        """
        paths, left_out = photos_below(folder)
        embeddings, failed = model.embed(paths, progress)
        left_out |= {str(paths[place]): reason for place, reason in failed.items()}
        kept = [place for place in range(len(paths)) if place not in failed]
        if not kept:
            raise ConfigurationError(
                f"none of the {len(paths)} images below {folder} can be read. The first: {paths[0]}: {failed[0]}"
            )
        files = [str(paths[place].relative_to(folder)) for place in kept]
        root, crop = os.path.abspath(folder), model.crop
        of = (model.checkpoint, model.class_path, model.digest, crop.size, crop.resize)
        return cls(embeddings[kept], files, root, *of), left_out  # type: ignore[arg-type]

    def model(self, checkpoint: str | Path | None = None) -> PhotoEmbedder:
        """The model that embedded the photographs; ``checkpoint``: where it is now, if it was moved."""
        return PhotoEmbedder.of(checkpoint or self.checkpoint, self.class_path, self.size, self.resize)

    def save(self, file: Path) -> None:
        """Write the index to ``file``. An interrupted call leaves the file as it was."""
        parts = {"format": FORMAT, **{field.name: getattr(self, field.name) for field in fields(self)}}
        content = io.BytesIO()  # torch's own writer does not say that a disk is full
        torch.save(parts, content)
        with whole_file(file) as whole:
            whole.write(content.getbuffer())

    @classmethod
    def load(cls, file: Path) -> PhotoIndex:
        """Raises `ConfigurationError`: ``file`` is no index of this version."""
        try:
            parts = torch.load(file, weights_only=True)
        except FileNotFoundError:
            raise ConfigurationError(
                f"{file} is not there. Make it: lightning-ring index CHECKPOINT FOLDER -o {file}"
            ) from None
        except Exception as error:
            raise ConfigurationError(f"{file} cannot be read as an index ({type(error).__name__}).") from error
        if not isinstance(parts, dict) or parts.pop("format", None) != FORMAT:
            raise ConfigurationError(f"{file} is no index of this version. Make one: lightning-ring index")
        return cls(**parts)

    def find(self, model: PhotoEmbedder, photos: Sequence[Path], k: int = 5, again: bool = False) -> list[list[Found]]:
        """For each of ``photos`` the ``k`` most similar ones of the index, best first. A photograph never finds itself.

        Args:
            again: Put the nearest into another order, by the neighbours that they share (`rerank`).

        Raises:
            ConfigurationError: ``model`` is not that of the index, or a photograph cannot be read.
        """
        if model.digest != self.digest:
            raise ConfigurationError(
                f"the index was made with other weights than those of {model.checkpoint}: its embeddings cannot be "
                f"compared. Give {self.checkpoint} as it was, or make the index anew."
            )
        queries, failed = model.embed(photos)
        if failed:
            place, reason = next(iter(failed.items()))
            raise ConfigurationError(f"{photos[place]} cannot be read as an image: {reason}")
        similarity, places = search(
            queries, self.embeddings, max(k, RERANKED) if again else k, exclude=self._places_of(photos)
        )
        found = []
        for row, (scores, near) in enumerate(zip(similarity, places, strict=True)):
            scores, near = scores[near >= 0], near[near >= 0]
            if again and len(near):
                num = min(k, len(near))
                order = rerank(queries[row : row + 1], self.embeddings[near], num, candidates=max(100, num))[0]
                near, scores = near[order], scores[order]
            found.append([self._found(int(n), float(s)) for n, s in zip(near[:k], scores[:k], strict=True)])
        return found

    def _places_of(self, photos: Sequence[Path]) -> Tensor:
        """Where each of ``photos`` is in the index; -1 for nowhere. Links are looked at as they are, and followed."""
        place_of = {file: place for place, file in enumerate(self.files)}
        root = Path(self.root)
        places = []
        for photo in photos:
            names = _below(Path(os.path.abspath(photo)), root), _below(photo.resolve(), root.resolve())
            places.append(next((place_of[name] for name in names if name in place_of), -1))
        return torch.tensor(places)

    def _found(self, place: int, similarity: float) -> Found:
        file = Path(self.files[place])
        return Found(Path(self.root) / file, str(file.parent) if file.parent.name else "", similarity)


def _below(photo: Path, root: Path) -> str:
    """The path of ``photo`` below ``root``; empty where it is elsewhere."""
    return str(photo.relative_to(root)) if photo.is_relative_to(root) else ""


def photos_below(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """All images below ``folder``, in the order of their paths, and why some links are not followed, by path.

    Hidden files and folders are left out.

    Raises:
        ConfigurationError: ``folder`` is no folder, or there are none.
        OSError: A folder below it cannot be read.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is not a folder; expected one that holds photographs.")
    loops: list[LeftOut] = []
    found = [
        Path(root) / file
        for root, files in walk(str(folder), "", loops, hidden=False)
        for file in files
        if file.lower().endswith(EXTENSIONS) and not file.startswith(".")
    ]
    if not found:
        raise ConfigurationError(f"{folder} holds no images. Known extensions: {', '.join(EXTENSIONS)}.")
    return sorted(found), {str(folder / loop.name): loop.reason for loop in loops}
