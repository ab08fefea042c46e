"""Times the optimizers against timm's and torch's, and prints ratios.

``python -m benchmarks.step.optim`` needs the ``bench`` extra; ``--help`` shows what can be chosen.
All optimizers of a table take turns, round after round, and a ratio is the median over rounds of
the ratio within a round, so that what else the machine does hits all of them alike. Each table
comes from a process of its own.

What a GPU is asked (`graph_rows`, `copy_bandwidth`) is told by `benchmarks.gpu`.
"""

import argparse
import itertools
import statistics
import subprocess
import sys
import time

import torch

from benchmarks.turns import parser_of
from lightning_ring.optim import LAMB, LARS


def resnet50():
    """Parameter shapes of torchvision's ResNet-50: 25.6 million in 161 tensors."""
    from torchvision.models import resnet50 as build

    with torch.device("meta"):
        return [tuple(param.shape) for param in build().parameters()]


def bert_base():
    """Parameter shapes of BERT-base: 109.5 million in 199 tensors."""
    width, inner = 768, 3072

    def linear(out, into):
        return [(out, into), (out,)]

    norm = [(width,), (width,)]
    attention = [shape for _ in range(4) for shape in linear(width, width)]
    layer = attention + norm + linear(inner, width) + linear(width, inner) + norm
    return [(30522, width), (512, width), (2, width), *norm, *(layer * 12), *linear(width, width)]


MODELS = {"resnet50": resnet50, "bert_base": bert_base}


def make_params(shapes, device):
    generator = torch.Generator().manual_seed(0)
    params = []
    for shape in shapes:
        param = (torch.randn(shape, generator=generator) * 0.05).to(device).requires_grad_()
        param.grad = (torch.randn(shape, generator=generator) * 1e-3).to(device)
        params.append(param)
    return params


def contenders(params):
    """Optimizers of the same parameters, with the same settings where they have the same maths."""
    from timm.optim import Lamb, Lars

    lamb, lars = SETTINGS["LAMB"][1], SETTINGS["LARS"][1]
    return {
        "timm Lamb": Lamb(params, max_grad_norm=None, **lamb),
        "LAMB": LAMB(params, **lamb),
        "timm Lamb, clipped": Lamb(params, max_grad_norm=1.0, **lamb),  # timm's default
        "LAMB, clipped": LAMB(params, max_grad_norm=1.0, **lamb),
        "timm Lars": Lars(params, **lars),
        "LARS": LARS(params, **lars),
        "torch AdamW fused": torch.optim.AdamW(params, lr=1e-4, fused=True),
    }


COMPARISONS = [  # ours, the peer
    ("LAMB", "timm Lamb, clipped"),  # both as installed: timm's default clips
    ("LAMB", "timm Lamb"),
    ("LAMB, clipped", "timm Lamb, clipped"),
    ("LARS", "timm Lars"),
]


def on_cpu(model, threads, num_rounds):
    """One table: milliseconds, ratios and extra memory."""
    torch.set_num_threads(threads)
    params = make_params(MODELS[model](), "cpu")
    optimizers = contenders(params)
    # One thread: time on the processor, which waiting for other processes does not lengthen.
    clock = time.thread_time if threads == 1 else time.perf_counter
    times = {name: [] for name in optimizers}
    for number in range(-2, num_rounds):  # the first two make the state, and compile
        for name, optimizer in optimizers.items():
            start = clock()
            optimizer.step()
            if number >= 0:
                times[name].append(clock() - start)
    unit = "processor time" if threads == 1 else "wall time"
    millions = sum(param.numel() for param in params) / 1e6
    yield f"\n{model}, {millions:.1f} M parameters, {threads} thread(s), {unit}\n"
    yield "| optimizer | ms, median | extra memory, % of parameters |\n|---|---|---|"
    for name, values in times.items():
        extra = 100 * peak_bytes(optimizers[name].step) / sum(p.nbytes for p in params)
        yield f"| {name} | {statistics.median(values) * 1e3:.1f} | {extra:.1f} |"
    yield ""
    for ours, peer in COMPARISONS:
        ratio = statistics.median(p / o for o, p in zip(times[ours], times[peer], strict=True))
        yield f"- {ours}: {ratio:.2f} times the speed of {peer}"


def peak_bytes(step):
    """Largest sum of tensor memory that ``step`` took and had not yet given back."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    running = peak = 0
    events = profile.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            running += event.nbytes()
            peak = max(peak, running)
    return peak


BYTES_PER_PARAMETER = {"LARS": 28, "LAMB": 40}
SETTINGS = {
    "LAMB": (LAMB, {"lr": 1e-4, "weight_decay": 0.01}),
    "LARS": (LARS, {"lr": 1.0, "momentum": 0.9, "weight_decay": 1e-4}),
}
TINY = [(64, 64), (64,), (1,)]


def ms_of(call, device, num_calls, num_rounds=7):
    """Median over rounds of the milliseconds of one call, on the device's clock."""

    def now():
        if device == "cpu":
            return time.perf_counter() * 1e3
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    rounds = []
    for _ in range(num_rounds + 1):
        begin = now()
        for _ in range(num_calls):
            call()
        end = now()
        if device == "cuda":
            end.synchronize()
        took = end - begin if device == "cpu" else begin.elapsed_time(end)
        rounds.append(took / num_calls)
    return statistics.median(rounds[1:])


def copy_bandwidth(device="cuda", num_bytes=2 << 30):
    """GB/s of a copy within the device's memory; bytes that are read and bytes that are written
    count.
    """
    source = torch.randn(num_bytes // 4, device=device)  # zeros could be copied faster
    target = torch.empty_like(source)
    return 2 * num_bytes / ms_of(lambda: target.copy_(source), device, 10) / 1e6


def captured_step(optimizer, device):
    """A replay of ``optimizer.step()`` as a CUDA graph; on the CPU the step itself."""
    if device != "cuda":
        return optimizer.step
    # The first steps make the state and compile the kernels, on another stream, as torch asks.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph.replay


def graph_rows(models, bandwidth, device="cuda", num_calls=20):
    """Replays of LAMB and LARS: ms, GB/s of the bytes that the rule must move, and their share of
    ``bandwidth`` (see `copy_bandwidth`), for each model.
    """
    for model, shapes in models.items():
        params = make_params(shapes, device)
        count = sum(param.numel() for param in params)
        for name, (optimizer_class, settings) in SETTINGS.items():
            optimizer = optimizer_class(params, capturable=device == "cuda", **settings)
            ms = ms_of(captured_step(optimizer, device), device, num_calls)
            speed = BYTES_PER_PARAMETER[name] * count / ms / 1e6
            found = {"optimizer": name, "model": model, "ms": ms, "gb_per_s": speed}
            yield found | {"share_of_copy": speed / bandwidth}


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    for model, threads in itertools.product(asked.models, asked.threads):
        if asked.in_process:
            print(*on_cpu(model, threads, asked.rounds), sep="\n", flush=True)
            continue
        words = ["--models", model, "--threads", str(threads), "--rounds", str(asked.rounds)]
        command = [sys.executable, "-m", "benchmarks.step.optim", "--in-process", *words]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
