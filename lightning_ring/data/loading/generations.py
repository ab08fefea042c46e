"""A loader's state names the generation of its set, and goes on with it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal, Protocol

from lightning_ring.data.sampling.sampler import OrderedSampler
from lightning_ring.errors import ConfigurationError

log = logging.getLogger(__name__)

ResumeAt = Literal["saved", "newest"]


class HasSource(Protocol):
    """Reads a data set, which may be put at another generation: its batch maker."""

    source: Any


class Generations:
    """What a loader does with a state that was saved at another generation of the set (`ShardDataset`).

    Args:
        maker: Makes the batches; its source is put at the generation of the state.
        make_sampler: Makes a sampler for a source; None: the sampler was given, and cannot be made again.
        resume_at: ``"saved"``: the run goes on with the generation that the state names, exactly; ``"newest"``: with
            the one that the source was opened at.
    """

    def __init__(
        self,
        maker: HasSource,
        make_sampler: Callable[[Any], OrderedSampler] | None,
        resume_at: ResumeAt,
    ) -> None:
        if resume_at not in ("saved", "newest"):
            raise ConfigurationError(f"resume_at={resume_at!r} was given, expected 'saved' or 'newest'.")
        self._maker = maker
        self._make_sampler = make_sampler
        self._resume_at = resume_at

    @property
    def generation(self) -> Any:
        """Of the source: a number, or a list of those of a `Mixture`; None where it has none."""
        return getattr(self._maker.source, "generation", None)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.generation is None else {"generation": self.generation}

    def resumed(self, state: dict[str, Any], sampler: OrderedSampler) -> tuple[OrderedSampler, bool]:
        """The sampler that goes on from ``state``, and whether it does so over other images than the state's.

        Raises:
            ConfigurationError: The set has changed, and the sampler cannot be made for the state's generation.
            ShardError: The set no longer has that generation.
        """
        saved, here = state.get("generation"), self.generation
        if saved == here or _sets_in(saved) != _sets_in(here):
            return sampler, False  # if they are two data sets, the sampler says so
        if self._resume_at == "newest":
            log.warning(
                "lightning_ring: the checkpoint was saved at generation %s of the images, and training goes on with "
                "generation %s. Until the next epoch, images may come twice, or not at all.",
                saved,
                here,
            )
            return sampler, True
        if self._make_sampler is None:
            how = "its sets at those" if isinstance(saved, list) else f"ShardDataset(..., generation={saved})"
            raise ConfigurationError(
                f"the checkpoint was saved at generation {saved} of the images, and this loader reads generation "
                f"{here}. To go on exactly, open {how}, or give image_loader a function that makes the sampler for a "
                "data set. To go on with the images as they are here, give it "
                'resume_at="newest".'
            )
        self._maker.source = self._maker.source.at(saved)
        log.info("lightning_ring: training goes on with generation %s of the images, as it was saved.", saved)
        return self._make_sampler(self._maker.source), False


def _sets_in(generation: Any) -> list[bool] | bool:
    """Which sets have a generation: of a `Mixture`, or of the one set."""
    return [number is not None for number in generation] if isinstance(generation, list) else generation is not None
