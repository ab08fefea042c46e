"""A cluster environment among ``plugins=`` beside our own: taken where both find the same ranks,
else an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment, SLURMEnvironment

from lightning_ring.errors import ConfigurationError, RankDiscoveryError
from lightning_ring.integrations.ranks.environment import RingEnvironment
from lightning_ring.options import RingOptions


def without_environments(plugins: Any, strategy: Any, caller: str) -> tuple[RingEnvironment, Any]:
    """The environment of ``strategy``, or of its name, and ``plugins`` without cluster environments
    that agree with it.

    Raises:
        RankDiscoveryError: A cluster environment among ``plugins`` says other ranks.
        ConfigurationError: A `SLURMEnvironment` of a Trainer says something else of requeueing than
            the strategy.
    """
    environment = (
        RingEnvironment(caller=caller)
        if isinstance(strategy, str)
        else strategy.cluster_environment
    )
    listed = list(plugins) if isinstance(plugins, Iterable) else [plugins]
    given = [plugin for plugin in listed if isinstance(plugin, ClusterEnvironment)]
    for each in given:
        _check_ranks(each, environment, caller)
        if caller == "Trainer" and isinstance(each, SLURMEnvironment):
            _check_requeueing(each, getattr(strategy, "options", RingOptions()))
    return environment, [plugin for plugin in listed if plugin not in given] if given else plugins


def _check_ranks(given: ClusterEnvironment, ours: RingEnvironment, caller: str) -> None:
    name = type(given).__name__
    if not given.creates_processes_externally:
        # our own launcher starts ranks for the Trainer that named the environment
        if ours.creates_processes_externally and "RING_LAUNCHER_PID" not in os.environ:
            raise RankDiscoveryError(
                f"{caller}(plugins=[{name}()]): {name} leaves it to the {caller} to start the "
                f"ranks, but {ours.launcher_name()} started {ours.world_size()} ranks. Leave "
                f"{name} out to take these, or start one process with plain `python`."
            )
        return
    found = (
        f"lightning_ring finds {_place(ours)}, as {ours.launcher_name()} started it"
        if ours.creates_processes_externally
        else "lightning_ring finds no launcher, and one process"
    )
    advice = (
        f"Leave {name} out to take what lightning_ring finds. If {name} is right, export RANK, "
        "WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT accordingly for "
        "each rank."
    )
    try:
        # as every strategy of Lightning does; `LightningEnvironment` knows only what it was told
        given.set_world_size(ours.world_size())
        given.set_global_rank(ours.global_rank())
        theirs = _place(given)
    except (KeyError, ValueError) as error:  # a variable that is not there
        raise RankDiscoveryError(
            f"{caller}(plugins=[{name}()]): {name} cannot tell the rank ({type(error).__name__}: "
            f"{error}), and {found}. {advice}"
        ) from error
    if theirs != _place(ours):
        raise RankDiscoveryError(
            f"{caller}(plugins=[{name}()]): {name} says {theirs}, but {found}. {advice}"
        )


def _place(environment: ClusterEnvironment) -> str:
    return (
        f"rank {environment.global_rank()} of {environment.world_size()}, "
        f"local rank {environment.local_rank()} on node {environment.node_rank()}"
    )


def _check_requeueing(given: SLURMEnvironment, options: RingOptions) -> None:
    signal = given.requeue_signal if given.auto_requeue else None
    if signal != options.requeue_signal:
        text = f"signal.{signal.name}" if signal is not None else "None"
        raise ConfigurationError(
            f"Trainer(plugins=[SLURMEnvironment(auto_requeue={given.auto_requeue}, "
            f"requeue_signal={given.requeue_signal!r})]): the strategy requeues the job by itself, "
            f"with requeue_signal={options.requeue_signal!r}. Write "
            f"RingStrategy(requeue_signal={text}) instead."
        )
