"""Everything that one NVIDIA GPU can tell, in one command: ``python -m benchmarks.gpu``.

Prints the step time of ResNet-50 (bf16-mixed, channels-last, batch 256) on a plain single device,
under Lightning's DDP (NCCL, one rank) and under the ring, with its collectives left out, as one
process alone does, and forced; the share of the memory bandwidth that LARS and LAMB reach; how fast
gradients are encoded as 8-bit integers and as signs; and runs the tests that need a GPU. It needs
no network and no data, and the extras ``recipes``, ``bench`` and ``test``. Without a GPU it says so
and ends with exit code 77.

``--device cpu --tiny`` walks the same way with a model of a few parameters, to see that the way is
open.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch

from benchmarks.comm import compression
from benchmarks.gpu import tests
from benchmarks.step import compare as step
from benchmarks.step import optim

NO_GPU = 77  # what test harnesses take for "skipped"
# with it alone would come the monitor, which is no collective
FORCED = "ring:force_communication=True,monitor=False"
TINY_SHAPES = [(64, 64), (64,)]


def steps(device: str, tiny: bool, batch: int) -> Iterator[str]:
    """Step times. The last line is what buckets, hooks and collectives cost where nobody is to
    be talked to.
    """
    contenders = ("auto", "ddp", "ring", FORCED)
    options = ["--device", device]
    if tiny:
        row = step.Row(
            "tiny",
            contenders,
            ranks=1,
            steps=2,
            rounds=1,
            start="exec" if device == "cuda" else "fork",
        )
    else:
        row = step.Row(
            "resnet50",
            contenders,
            (("ring", "auto", 1.01),),
            ranks=1,
            steps=10,
            rounds=6,
            start="exec",
        )
        options += ["--precision", "bf16-mixed", "--channels-last", "--batch", str(batch)]
    seconds, facts = step.measure(row, options)
    yield from step.report(row, seconds, facts)
    ours, plain = (sorted(seconds[name])[len(seconds[name]) // 2] for name in (FORCED, "ring"))
    more = 1e3 * (ours - plain)
    yield f"- the reducer with its collectives at world size 1: {more:+.2f} ms a step"


def optimizers(device: str, tiny: bool) -> Iterator[str]:
    """LARS and LAMB against the bandwidth of a copy."""
    if tiny:
        optim.MODELS["tiny"] = lambda: list(TINY_SHAPES)
    model = "tiny" if tiny else "resnet50"
    yield from (
        optim.on_cuda(model, 7)
        if device == "cuda"
        else optim.on_cpu(model, threads=1, num_rounds=1)
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="a model of a few parameters, a few steps"
    )
    parser.add_argument("--batch", type=int, default=256)
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        print(
            "no NVIDIA GPU that torch can use on this machine: nothing was measured",
            file=sys.stderr,
        )
        return NO_GPU
    name = torch.cuda.get_device_name() if asked.device == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}", flush=True)
    for line in steps(asked.device, asked.tiny, asked.batch):
        print(line, flush=True)
    for line in optimizers(asked.device, asked.tiny):
        print(line, flush=True)
    for line in compression.codes(asked.device, 2**16 if asked.tiny else 2**28):
        print(line, flush=True)
    return tests.main(0 if asked.tiny else 8)


if __name__ == "__main__":
    sys.exit(main())
