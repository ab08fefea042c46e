"""Bytes at the wires of parameter servers beside the ring's: what hosts send and receive in a step.

    python -m benchmarks.server --hosts 2 3 4

One rank on each host trains a matrix of --mb MB. Counted are ``tx_bytes`` and ``rx_bytes`` of each
host's interface, headers included, as shares of the gradients' bytes: of the first host, where a
single server is, and of the last one. Needs Linux, root, ip and tc
(`benchmarks.hosts`).
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn

from benchmarks.wire_bytes import passed_by_all, run_on_hosts
from lightning_ring import distribute
from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.algorithms.local import AsynchronousGossip
from lightning_ring.algorithms.server import ParameterServer

_STEPS = 10
WAYS: dict[str, str | Algorithm] = {
    "ring": "ring",
    "servers on all ranks": ParameterServer(),
    "one server": ParameterServer(servers=1),
    "one server, async": ParameterServer(servers=1, mode="async"),
    "asynchronous gossip": AsynchronousGossip(),
}


def take_steps(number: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(number):
        net(torch.ones(1, 1000)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def in_rank(num_bytes: int) -> None:
    torch.set_num_threads(1)
    for name, algorithm in WAYS.items():
        net = nn.Linear(1000, num_bytes // 4000, bias=False)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with distribute(net, optimizer, algorithm=algorithm) as training:
            assert training.communicator is not None
            take_steps(2, net, optimizer)
            before = torch.tensor(passed_by_all(training.communicator))
            take_steps(_STEPS, net, optimizer)
            after = torch.tensor(passed_by_all(training.communicator))
            shares = (after - before) / (_STEPS * net.weight.nbytes)
            first, *_, last = training.all_gather(shares)
            if training.rank == 0:
                numbers = "".join(f"{value:10.2f}" for value in (*first.tolist(), *last.tolist()))
                print(f"{training.world_size:5}  {name:24}{numbers}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mb", type=float, default=8.0, help="size of the gradients, in units of 10^6 bytes"
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--in-rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.in_rank:
        in_rank(int(asked.mb * 1e6))
        return 0
    heading = f"hosts  {'':24}{'first: sent':>10}{'received':>9}{'last: sent':>11}{'received':>9}"
    return run_on_hosts(
        "benchmarks.server", asked.hosts, "--in-rank", "--mb", str(asked.mb), heading=heading
    )


if __name__ == "__main__":
    sys.exit(main())
