"""``lightning-ring plan``: how far a recorded job will scale, and what to change first."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lightning_ring.errors import ConfigurationError
from lightning_ring.tools.plan import report
from lightning_ring.tools.plan.inputs import parse_link, read_profile
from lightning_ring.tools.plan.model import Cluster, world_sizes

MOST_RANKS = 10_000


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    profile = read_profile(options.profile)
    per_node = options.ranks_per_node
    if per_node is None:
        per_node = profile.run.world_size // profile.run.num_nodes
    _check_range(per_node, "--ranks-per-node")
    if options.node is None and per_node > 1:
        raise ConfigurationError(
            f"{per_node} ranks a node: say how those talk, with --node bench.json (of "
            "`lightning-ring bench` on one node) or --node MICROSECONDS,GBIT."
        )
    network = parse_link(options.network, "--network")
    node = parse_link(options.node, "--node") if options.node else None
    sizes = chosen_sizes(options.ranks, per_node)
    # with one rank a node nothing travels inside one
    clusters = [Cluster(size, per_node, network, node or network) for size in sizes]
    table = report.tabulate(profile, clusters)
    most = sizes[-1] if options.ranks else max(64, sizes[0])
    at = max(index for index, size in enumerate(sizes) if size <= most)
    found = report.changes(profile, clusters[at])
    print(*report.heading(profile, network, node), sep="\n")
    print("", *report.table_lines(table), "", sep="\n")
    now = table[report.AS_IT_IS][at]
    print(*report.advice(now, found, profile.phases.data), *report.NOTES, sep="\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-ring plan",
        description="Predict step time and efficiency on 1 to 10,000 ranks, for rings, a sharded "
        "optimizer, 16 bits and LocalSGD, from a profile that lightning_ring.monitor.RingProfile "
        "recorded, on one rank or more.",
        epilog="NETWORK is best the file of `lightning-ring bench --json` on that wire. It may "
        "be Ethernet's name (1gbit, 2.5gbit, 10gbit, 25gbit, 100gbit), or MICROSECONDS,GBIT.",
    )
    add = parser.add_argument
    add("profile", metavar="PROFILE.json")
    add("--network", metavar="NETWORK", required=True, help="between nodes")
    add("--node", metavar="NETWORK", help="between the ranks of a node")
    add("--ranks-per-node", type=int, metavar="N", help="default: as recorded")
    add("--ranks", metavar="N,...", help="these numbers (default: powers of two to 10,000)")
    return parser


def chosen_sizes(asked: str | None, per_node: int) -> list[int]:
    if asked is None:
        return world_sizes(per_node, MOST_RANKS)
    words = asked.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ConfigurationError(f"--ranks {asked}: write numbers of ranks, for instance 1,8,64.")
    sizes = sorted(set(map(int, words)))
    for size in sizes:
        _check_range(size, "--ranks")
        if size > per_node and size % per_node:
            raise ConfigurationError(
                f"--ranks {size}: does not fill nodes of {per_node} ranks. Take a multiple, such "
                f"as {size // per_node * per_node}, or another --ranks-per-node."
            )
    return sizes


def _check_range(number: int, option: str) -> None:
    if not 1 <= number <= MOST_RANKS:
        raise ConfigurationError(f"{option} {number}: must be from 1 to {MOST_RANKS:,}.")
