"""What `lightning-ring plan` predicts for the study's runs, from a profile of the same training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hydra.utils import instantiate

from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.gradients.compression import Compressor
from lightning_ring.tools.plan.choice import predict_exchange
from lightning_ring.tools.plan.model import Cluster, Link, Settings, predict
from lightning_ring.tools.plan.profile import Profile
from recipes.wires.run import Method
from recipes.wires.run import Settings as StudySettings


def predicted_seconds(method: Method, profile: Profile, straggler: bool, study: StudySettings) -> float | None:
    """Of a step, in the mean over a run; `None` for an algorithm whose messages are not known."""
    if study.hosts != study.ranks or profile.link is None:
        return None
    link = Link("measured", profile.link)
    cluster = Cluster(study.ranks, 1, link, link)
    profile = _slowed(profile, method, study.ranks) if straggler else profile
    ring = predict(profile, cluster, Settings()).seconds
    step = _step(method.distribute, profile, cluster)
    return (
        None if step is None else (method.whole_steps * ring + (study.steps - method.whole_steps) * step) / study.steps
    )


def _step(distribute: dict[str, Any] | None, profile: Profile, cluster: Cluster) -> float | None:
    if distribute is None:
        return predict(profile, cluster, Settings(bucket_cap_mb=25)).seconds
    made = {name: instantiate(value) for name, value in distribute.items() if isinstance(value, dict)}
    if isinstance(algorithm := made.get("algorithm"), Algorithm):
        exchange = algorithm.exchange()
        return None if exchange is None else predict_exchange(profile, cluster, Settings(), exchange).seconds
    compression = made.get("compression", distribute.get("compression"))
    name = compression.name if isinstance(compression, Compressor) else compression
    return predict(profile, cluster, Settings(compression=name)).seconds


def _slowed(profile: Profile, method: Method, num_ranks: int) -> Profile:
    """With one rank that takes twice as long, for which the others wait unless each has its own pace."""
    phases = profile.phases
    times = 2.0 if not method.own_pace else num_ranks / (num_ranks - 0.5)
    return replace(profile, phases=replace(phases, other=phases.other + (times - 1) * phases.alone))
