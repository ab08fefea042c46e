"""An index of photographs: their embeddings and where they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lightning_ring.errors import ConfigurationError
from lightning_ring.retrieval import rerank, search
from recipes.recognition.photos import PhotoEmbedder, photos_below

BATCH = 64
FORMAT = "lightning_ring photographs 1"
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
        checkpoint, digest: Of the model that embedded them, as of `PhotoEmbedder`.
    """

    embeddings: Tensor
    files: list[str]
    root: str
    checkpoint: str
    digest: str

    @classmethod
    def build(
        cls, model: PhotoEmbedder, folder: Path, progress: Callable[[int, int], object] = lambda done, total: None
    ) -> tuple[PhotoIndex, dict[str, str]]:
        """Embed all photographs below ``folder``; also returns why some were left out, by path."""
        paths, rows, kept = photos_below(folder), [], []
        left_out: dict[str, str] = {}
        for start in range(0, len(paths), BATCH):
            batch = paths[start : start + BATCH]
            embeddings, failed = model.embed(batch)
            good = [place for place in range(len(batch)) if place not in failed]
            rows.append(embeddings[good])
            kept += [str(batch[place].relative_to(folder)) for place in good]
            left_out |= {str(batch[place]): reason for place, reason in failed.items()}
            progress(start + len(batch), len(paths))
        if not kept:
            raise ConfigurationError(f"none of the {len(paths)} images below {folder} can be read: {left_out}")
        return cls(torch.cat(rows), kept, str(folder.absolute()), model.checkpoint, model.digest), left_out

    def save(self, file: Path) -> None:
        """Written beside ``file`` first: an interrupted call leaves the old index."""
        parts = {"format": FORMAT, **{name: getattr(self, name) for name in self.__slots__}}
        temporary = file.with_name(f".{file.name}.part")
        torch.save(parts, temporary)
        temporary.replace(file)

    @classmethod
    def load(cls, file: Path) -> PhotoIndex:
        try:
            parts = torch.load(file, weights_only=True)
        except FileNotFoundError:
            raise ConfigurationError(
                f"{file} is not there. Make it: python recipes/index.py CHECKPOINT FOLDER"
            ) from None
        except Exception as error:
            raise ConfigurationError(f"{file} cannot be read as an index ({type(error).__name__}).") from error
        if not isinstance(parts, dict) or parts.pop("format", None) != FORMAT:
            raise ConfigurationError(f"{file} is no index of photographs. Make one: python recipes/index.py")
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
        place_of = {file: place for place, file in enumerate(self.files)}
        inside = [_below(photo, Path(self.root)) for photo in photos]
        itself = torch.tensor([place_of.get(file, -1) if file else -1 for file in inside])
        similarity, places = search(queries, self.embeddings, max(k, RERANKED) if again else k, exclude=itself)
        found = []
        for row, (scores, near) in enumerate(zip(similarity, places, strict=True)):
            near, scores = near[scores > -torch.inf], scores[scores > -torch.inf]
            if again and len(near):
                num = min(k, len(near))
                order = rerank(queries[row : row + 1], self.embeddings[near], num, candidates=max(100, num))[0]
                near, scores = near[order], scores[order]
            found.append([self._found(int(n), float(s)) for n, s in zip(near[:k], scores[:k], strict=True)])
        return found

    def _found(self, place: int, similarity: float) -> Found:
        file = Path(self.files[place])
        return Found(Path(self.root) / file, str(file.parent) if file.parent.name else "", similarity)


def _below(photo: Path, root: Path) -> str | None:
    """The path of ``photo`` below ``root``, links followed; ``None`` where it is elsewhere."""
    try:
        return str(photo.resolve().relative_to(root.resolve()))
    except ValueError:
        return None
