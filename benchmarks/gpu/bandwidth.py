"""What share of the card's bandwidth LAMB, LARS and the codes of compressed gradients reach."""

from __future__ import annotations

import argparse
import json

from benchmarks.comm.compression import code_speeds
from benchmarks.step import optim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    copy = optim.copy_bandwidth() if asked.device == "cuda" else 1.0
    print(json.dumps({"copy_gb_s": round(copy)}), flush=True)
    models = {"tiny": optim.TINY} if asked.tiny else {n: make() for n, make in optim.MODELS.items()}
    for row in optim.graph_rows(models, copy, asked.device, num_calls=1 if asked.tiny else 20):
        print(json.dumps(row), flush=True)
    for name in optim.SETTINGS:
        host = optim.host_ms(name, next(iter(models.values())), asked.device)
        print(json.dumps({"optimizer": name, "host_ms": host}), flush=True)
    for row in code_speeds(asked.device, 2**16 if asked.tiny else 2**30, copy):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
