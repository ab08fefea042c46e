"""What `lightning-ring plan` predicts for the study's runs, from a profile of the same training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hydra.utils import instantiate

from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.gradients.compression import Compressor
from lightning_ring.tools.plan.choice import Paces, predict_paces
from lightning_ring.tools.plan.model import Cluster, Link, Settings, predict
from lightning_ring.tools.plan.profile import Phases, Profile
from recipes.wires.run import Method
from recipes.wires.run import Settings as StudySettings


def predicted_seconds(
    method: Method, profile: Profile, straggler: bool, study: StudySettings, batch_seconds: float
) -> float | None:
    """Of a step, in the mean over a run; `None` for an algorithm whose messages are not known.

    ``batch_seconds`` took a batch before the run, without communication: other runs find the
    machine busier, or less.
    """
    if study.hosts != study.ranks or profile.link is None:
        return None
    link = Link("measured", profile.link)
    profile = _at_speed_of(profile, batch_seconds)
    cluster = Cluster(study.ranks, 1, link, link)
    together, step_of = _step_of(method.distribute, cluster)
    if step_of is None:
        return None
    slowest = _slowed(profile) if straggler else profile
    ring, (step, _) = predict(slowest, cluster, Settings()).seconds, step_of(slowest)
    if not together:  # the last rank is the slow one
        paces = [step_of(each) for each in [*(study.ranks - 1) * [profile], slowest]]
        step = _mean_seconds([(pace[1], pace[rank % 2]) for rank, pace in enumerate(paces)], study)
    return (method.whole_steps * ring + (study.steps - method.whole_steps) * step) / study.steps


def _mean_seconds(paces: list[tuple[float, float]], study: StudySettings) -> float:
    """Of a step of ranks that take a number of steps together, each as many as it can, between two
    evaluations.

    ``paces``: by rank, seconds of its first step, which waits for nothing, and of the others. By
    and large a rank that arrives at an evaluation waits for half of the longest step.
    """
    steps = study.eval_every * len(paces) - sum(1 - first / pace for first, pace in paces)
    return (
        steps / sum(1 / pace for _, pace in paces) + max(pace for _, pace in paces) / 2
    ) / study.eval_every


def _step_of(
    distribute: dict[str, Any] | None, cluster: Cluster
) -> tuple[bool, Callable[[Profile], tuple[float, float]] | None]:
    """Whether a slow rank holds up the others, and from a profile the seconds of an even and of
    an odd rank's step.
    """
    if distribute is None:
        own = Settings(bucket_cap_mb=25)  # and its calls wait in no threads of Python
        return (
            True,
            lambda profile: 2 * (predict(replace(profile, call=None), cluster, own).seconds,),
        )
    made = {
        name: instantiate(value) for name, value in distribute.items() if isinstance(value, dict)
    }
    if isinstance(algorithm := made.get("algorithm"), Algorithm):
        exchange = algorithm.exchange()
        if exchange is None:
            return True, None
        return algorithm.steps_together, lambda profile: _even_and_odd(
            predict_paces(profile, cluster, Settings(), exchange)
        )
    compression = made.get("compression", distribute.get("compression"))
    name = compression.name if isinstance(compression, Compressor) else compression
    return (
        True,
        lambda profile: 2 * (predict(profile, cluster, Settings(compression=name)).seconds,),
    )


def _even_and_odd(paces: Paces) -> tuple[float, float]:
    return paces.asking, paces.answering


def _at_speed_of(profile: Profile, batch_seconds: float) -> Profile:
    """What ``profile``'s rank takes where its batch takes ``batch_seconds``."""
    times = batch_seconds / profile.phases.alone
    phases = Phases(
        **{name: times * getattr(profile.phases, name) for name in Phases.__dataclass_fields__}
    )
    gradients = tuple(
        replace(gradient, ready=times * gradient.ready) for gradient in profile.gradients
    )
    encoding = {name: times * seconds for name, seconds in (profile.encoding or {}).items()}
    return replace(profile, phases=phases, gradients=gradients, encoding=encoding)


def _slowed(profile: Profile) -> Profile:
    """That of a rank which takes twice as long."""
    phases = profile.phases
    return replace(profile, phases=replace(phases, other=phases.other + phases.alone))
