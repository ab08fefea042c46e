"""``lightning-ring plan``: how far a recorded job will scale, and what to change first."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning_ring.cli.arguments import check_output, check_plot
from lightning_ring.errors import ConfigurationError
from lightning_ring.tools.plan import report
from lightning_ring.tools.plan.advice import advise, in_words
from lightning_ring.tools.plan.choice import choices, recommended
from lightning_ring.tools.plan.choice import lines as choice_lines
from lightning_ring.tools.plan.model import (
    COMPRESSOR_NAMES,
    Cluster,
    Link,
    Settings,
    predict,
    world_sizes,
)
from lightning_ring.tools.plan.networks import parse_link
from lightning_ring.tools.plan.profile import Profile, check_same_model, json_text, read_profile

MOST_RANKS = 10_000


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    check_output("--json", options.json)
    check_plot(options.plot)
    profile = read_profile(options.profile)
    others = [(path, read_profile(path)) for path in options.check]
    for path, other in others:
        check_same_model(options.profile, profile, path, other)
    per_node = chosen_ranks_per_node(options.ranks_per_node, profile)
    network, node = chosen_links(options, profile, per_node)
    settings = chosen_settings(options, profile)
    sizes = chosen_sizes(options.ranks, per_node)
    table = tabulate(profile, network, node, per_node, settings, sizes)
    at = (
        options.at
        if options.at is not None
        else max(size for size in sizes if size <= max(64, sizes[0]))
    )
    _check_size(at, per_node, "--at")
    advice = advise(profile, _cluster(at, per_node, network, node), settings)
    checks = [check(path, other, profile, options, network, node) for path, other in others]
    print(*report.heading(profile, network, node, per_node, settings), sep="\n")
    print("", *report.table_lines(table, profile.run.batch_size), sep="\n")
    found = choices(profile, _cluster(at, per_node, network, node), settings)
    print("", *choice_lines(found), sep="\n")
    print("", *report.slower_topology(table), f"what to change first: {in_words(advice)}", sep="\n")
    print(report.ASSUMED, report.ERROR_RANGE, sep="\n")
    print(*map(report.check_line, checks), sep="\n", end="\n" if checks else "")
    if options.json is not None:
        content = report.as_json(profile, network, node, per_node, settings, table, advice, checks)
        content["choices"] = [asdict(choice) for choice in found]
        content["recommended"] = recommended(found).argument
        Path(options.json).write_text(json_text(content))
    if options.plot is not None:
        report.plot(table, f"{profile.model.name}, {network.name}", options.plot)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-ring plan",
        description="Predict step time and efficiency on 1 to 10,000 ranks, for one ring, rings "
        "nested by node, and a sharded optimizer, from a profile that "
        "lightning_ring.monitor.RingProfile recorded, on one rank or more.",
        epilog="NETWORK is a name (1gbit, 10gbit, 25gbit, 100gbit, roce-100, ib-hdr, ib-ndr, "
        "nvlink4, ...), 8xib-ndr for eight adapters a host, MICROSECONDS,GBIT of a message, or "
        "the file of `lightning-ring bench --json`.",
    )
    parser.add_argument("profile", metavar="PROFILE.json")
    parser.add_argument("--network", metavar="NETWORK", help="between nodes (default: as recorded)")
    parser.add_argument(
        "--node", metavar="NETWORK", help="between the ranks of a node (default: as recorded)"
    )
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="default: as recorded")
    parser.add_argument(
        "--ranks", metavar="N,...", help="these numbers of ranks (default: powers of two to 10,000)"
    )
    parser.add_argument(
        "--at", type=int, metavar="N", help="ranks that the advice is for (default: 64)"
    )
    parser.add_argument(
        "--topology",
        choices=("auto", "flat", "hierarchical"),
        default="auto",
        help="of RingStrategy (default: auto, whatever was recorded: it depends on the nodes)",
    )
    parser.add_argument(
        "--compression", choices=("none", *COMPRESSOR_NAMES), help="default: as recorded"
    )
    parser.add_argument("--bucket-cap-mb", type=float, metavar="MIB", help="default: as recorded")
    parser.add_argument(
        "--check",
        nargs="+",
        default=[],
        metavar="OTHER.json",
        help="profiles to check predictions with",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write all numbers, in bytes and seconds (null: without limit)",
    )
    parser.add_argument(
        "--plot", metavar="FILE.png", help="draw efficiency and step time (needs matplotlib)"
    )
    return parser


def chosen_ranks_per_node(asked: int | None, profile: Profile) -> int:
    if asked is None:
        return profile.run.world_size // profile.run.num_nodes
    if not 1 <= asked <= MOST_RANKS:
        raise ConfigurationError(f"--ranks-per-node {asked}: must be from 1 to {MOST_RANKS:,}.")
    return asked


def chosen_links(
    options: argparse.Namespace, profile: Profile, per_node: int
) -> tuple[Link, Link | None]:
    """Between nodes and inside one; raises `ConfigurationError` if a link is neither given nor
    recorded.
    """
    measured = (
        None
        if profile.link is None
        else Link(f"measured by {Path(options.profile).name}", profile.link)
    )
    level = profile.link_level
    network = (
        parse_link(options.network, "--network")
        if options.network
        else measured
        if level == "network"
        else None
    )
    node = (
        parse_link(options.node, "--node")
        if options.node
        else measured
        if level == "node"
        else None
    )
    if network is None:
        raise ConfigurationError(
            f"{options.profile} was recorded on {profile.run.num_nodes} node(s) and has not "
            "measured a network. Say which one to plan for, such as --network 10gbit, --network "
            "30,10 (µs, Gbit/s) or --network bench.json."
        )
    if node is None and per_node > 1:
        raise ConfigurationError(
            f"{per_node} ranks a node, and {options.profile} has not measured how those talk. Say "
            "it, such as --node nvlink4, --node pcie4, or --node bench.json (of `lightning-ring "
            "bench` on one node)."
        )
    return network, node


def chosen_settings(options: argparse.Namespace, profile: Profile) -> Settings:
    """The settings of the run, except for its topology, which depends on the nodes, and what the
    command line sets.
    """
    run = profile.run
    cap = options.bucket_cap_mb
    if cap is not None and not 0 < cap < float("inf"):
        raise ConfigurationError(
            f"--bucket-cap-mb {cap:g}: must be a size in MiB greater than 0, such as 25."
        )
    if cap is None:
        cap = None if isinstance(run.bucket_cap_mb, str) else run.bucket_cap_mb
    compression = run.compression if options.compression is None else options.compression
    if compression not in (None, "none", *COMPRESSOR_NAMES):
        raise ConfigurationError(
            f"{options.profile} was recorded with compression {compression!r}, whose messages "
            "`plan` cannot predict. Say --compression none, or one of "
            f"{', '.join(COMPRESSOR_NAMES)}."
        )
    return Settings(
        options.topology, run.sharded, None if compression == "none" else compression, cap
    )


def chosen_sizes(asked: str | None, per_node: int) -> list[int]:
    if asked is None:
        return world_sizes(per_node, MOST_RANKS)
    sizes = []
    for text in asked.split(","):
        if not text.strip().isdecimal():
            raise ConfigurationError(
                f"--ranks {asked}: {text!r} is no number of ranks. Write for instance 1,8,64."
            )
        _check_size(int(text), per_node, "--ranks")
        sizes.append(int(text))
    return sorted(set(sizes))


def _check_size(size: int, per_node: int, option: str) -> None:
    if not 1 <= size <= MOST_RANKS:
        raise ConfigurationError(f"{option} {size}: must be from 1 to {MOST_RANKS:,}.")
    if size > per_node and size % per_node:
        raise ConfigurationError(
            f"{option} {size}: does not fill nodes of {per_node} ranks. Take a multiple, such as "
            f"{size // per_node * per_node}, or another --ranks-per-node."
        )


def _cluster(size: int, per_node: int, network: Link, node: Link | None) -> Cluster:
    # with one rank a node nothing travels inside one
    return Cluster(size, per_node, network, node or network)


def tabulate(
    profile: Profile,
    network: Link,
    node: Link | None,
    per_node: int,
    settings: Settings,
    sizes: Sequence[int],
) -> dict[str, list[report.PredictedStep]]:
    """Steps of ``ring`` as one ring and nested by node, and of ``ring_sharded`` as ``settings``
    have it.
    """
    ways = {
        "flat": replace(settings, topology="flat", shard_optimizer=False),
        "hierarchical": replace(settings, topology="hierarchical", shard_optimizer=False),
        "sharded": replace(settings, shard_optimizer=True),
    }
    if per_node == 1 or profile.run.device != "cpu":
        del ways["hierarchical"]  # the same as flat, or refused by the strategy
    return {
        way: [predict(profile, _cluster(size, per_node, network, node), chosen) for size in sizes]
        for way, chosen in ways.items()
    }


def check(
    path: str,
    other: Profile,
    profile: Profile,
    options: argparse.Namespace,
    network: Link,
    node: Link | None,
) -> dict[str, Any]:
    """Predict the run that ``other`` recorded from ``profile``'s computation, and compare."""
    run = other.run
    per_node = run.world_size // run.num_nodes
    if other.link is not None and other.link_level == "node":
        node = node if options.node else Link(path, other.link)
    if other.link is not None and other.link_level == "network" and not options.network:
        network = Link(path, other.link)
    if per_node > 1 and run.world_size > 1 and node is None:
        raise ConfigurationError(
            f"--check {path}: {per_node} ranks shared a node; say how they talk (--node ...)."
        )
    settings = chosen_settings(
        argparse.Namespace(
            profile=path, compression=None, bucket_cap_mb=None, topology=run.topology
        ),
        other,
    )
    step = predict(profile, _cluster(run.world_size, per_node, network, node), settings)
    return {
        "profile": path,
        "world_size": run.world_size,
        "num_nodes": run.num_nodes,
        "predicted_seconds": step.seconds,
        "measured_seconds": other.phases.total,
        "error": step.seconds / other.phases.total - 1,
    }
