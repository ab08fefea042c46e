"""What an all-reduce takes by the α–β model (`lightning_ring.comm.cost`). Nothing runs.

    lightning-ring bench -n 2 --backends auto gloo --collectives all_reduce --json bench.json
    python -m benchmarks.scale.arithmetic bench.json --mib 100

A node has 8 ranks. Between them a message costs what ``auto`` measured, and between nodes what
``gloo`` did. The hierarchy does one after the other, as for a tensor of one piece; its rings across
nodes share the wire, with 1/8 of the bytes each. A sharded step waits for its reduce-scatter; the
all-gather is due in the next forward.
"""

import argparse
import json
from pathlib import Path

from lightning_ring.comm.cost import CostModel

PER_NODE = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bench", type=Path)
    parser.add_argument("--mib", type=float, default=100)
    asked = parser.parse_args()
    measured = json.loads(asked.bench.read_text())["models"]
    links = {one["backend"]: CostModel(one["alpha_seconds"], one["bandwidth"]) for one in measured}
    node, wire, size = links["auto"], links["gloo"], asked.mib * 2**20
    for name, link in (("node", node), ("wire", wire)):
        print(f"{name}: {1e6 * link.alpha_seconds:.0f} us, {link.bandwidth / 1e9:.2f} GB/s")
    print("ranks, seconds of a ring, of the hierarchy, of its reduce-scatter")
    for ranks in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
        nested = [
            node.seconds(size, PER_NODE, each) + wire.seconds(size, ranks // PER_NODE, each)
            for each in ("all_reduce", "reduce_scatter")
        ]
        print(f"{ranks:5} {wire.seconds(size, ranks):8.3f} {nested[0]:8.3f} {nested[1]:8.3f}")


if __name__ == "__main__":
    main()
