"""Collectives that take as long as on a wire, on one GPU: ``python -m benchmarks.gpu.delayed``,
under 90 s.

One rank trains through the real NCCL backend of lightning_ring, over a stand-in for the group. A
collective runs on a stream of its own, after the caller's current stream: it copies the tensor
away, fills its memory with NaN, sleeps as long as a wire of 10, 25 or 50 GB/s would need, and puts
the result back. At the first `wait` it lets go of the tensors, as torch's NCCL works do. Whoever
reads too early reads NaN, and what is written too early is lost, or is sent. A communication hook
makes torch's DistributedDataParallel meet the same delay.

An all-reduce of S bytes takes S / bandwidth; its halves, reduce-scatter and all-gather, take half
of that each.

It prints a line of JSON for each check (``check``, ``ok``), and for each bandwidth and contender
(``plain``, which sends nothing, ``ddp``, ``ring``, ``sharded``) a row of ResNet-50 in bf16-mixed,
channels-last:

- ``step_ms``: the median time of a step by the GPU's clock, in turns of a few steps;
- ``exposed_ms``: the median of that less the time of ``plain`` in the same round;
- ``of_ddp``: the ratio of the two medians of exposed time;
- ``wire_ms``: how long collectives slept in a step;
- ``host_ms``: how long the host took to launch one, and to wait where the GPU's queue was full.

It proves the order of streams (each contender trains to the same parameters as ``plain``), and how
much of a wire's time backward hides, for ``sharded`` also the next forward. It does not prove what
NCCL's kernels take from the others: they occupy SMs and memory bandwidth, and NVLink has its own
load. Nor does it prove more ranks than one, and with them mirrors: see `thread_ranks`.

The exit code is 1 if a check fails, and 77 without a GPU. ``--device cpu --tiny`` walks the same
way without streams, with a small model: a collective ends when it is waited for.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from benchmarks.gpu.thread_ranks import COMPRESSORS, NO_GPU, Found, net_of, row, train, worse
from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.comm.backends import nccl
from lightning_ring.comm.backends.nccl import NCCLCommunicator
from lightning_ring.comm.communicator import Communicator, as_bytes
from lightning_ring.comm.recording import RecordedCommunicator
from lightning_ring.comm.waiting import WaitPolicy
from lightning_ring.gradients.compression import TernGrad
from tests.comm.backends.fake_nccl import Compute, CPUTensorsOverNCCL, FakeDistributed
from tests.thread_ranks import ThreadCommunicator, ThreadWorld

BANDWIDTHS = (10.0, 25.0, 50.0)  # GB/s
SLOW = 0.05  # GB/s, for models of a few parameters
CHECKED_STEPS = 3
CALIBRATION_CYCLES = 2_000_000  # about 1 ms
WHOLE = ("all_reduce", "broadcast")  # the other collectives are halves of an all-reduce

Finish = Callable[[list[Tensor]], object]


class Wire:
    """Carries tensors at ``gb_s`` GB/s on a stream of its own. 0: at once, and the caller waits.

    Attributes:
        strict: The caller's stream goes on once the memory is NaN: none of its reads is too early
            to find that. Without, nothing but the collective delays it.
        sleeps: On a GPU, events before and after each delay since the list was last cleared.
        cycles_per_second: Of the GPU's clock, as `calibrate` found it.
    """

    def __init__(self, device: str, gb_s: float) -> None:
        self.gb_s = gb_s
        self.strict = True
        self.sleeps: list[tuple[Any, Any]] = []
        self.cycles_per_second = 1.5e9
        # as NCCL's kernels, it does not queue for SMs after all blocks of a convolution
        self.stream = torch.cuda.Stream(priority=-1) if device == "cuda" else None

    @torch.no_grad()
    def carry(
        self, sent: Sequence[Tensor], outputs: Sequence[Tensor], num_bytes: float, finish: Finish
    ) -> LateWork:
        """``finish(copies)`` writes ``outputs`` from copies of ``sent``."""
        work = self._start(sent, outputs, num_bytes, finish)
        if not self.gb_s:
            work.wait()
        return work

    def _start(
        self, sent: Sequence[Tensor], outputs: Sequence[Tensor], num_bytes: float, finish: Finish
    ) -> LateWork:
        if self.stream is None:
            aside = self._take_away(sent, outputs)
            return LateWork((sent, outputs), arrive=lambda: arrive(sent, aside, finish))
        caller = torch.cuda.current_stream()
        self.stream.wait_stream(caller)
        with torch.cuda.stream(self.stream):
            aside = self._take_away(sent, outputs)
            if self.strict:
                caller.wait_stream(self.stream)
            if self.gb_s:
                self._sleep(num_bytes / (1e9 * self.gb_s))
            arrive(sent, aside, finish)
            over = torch.cuda.Event()
            over.record()
        return LateWork((sent, outputs), over=over)

    def _take_away(self, sent: Sequence[Tensor], outputs: Sequence[Tensor]) -> dict[int, Tensor]:
        """What is sent in place, by its address; its memory is NaN, and so is that of other
        results.

        The rest may be read meanwhile, as NCCL reads it.
        """
        places = {tensor.data_ptr(): tensor for tensor in outputs}
        aside = {t.data_ptr(): t.clone() for t in sent if t.data_ptr() in places}
        for tensor in places.values():
            as_bytes(tensor).fill_(255)  # NaN in every type that has one
        return aside

    def _sleep(self, seconds: float) -> None:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        torch.cuda._sleep(int(seconds * self.cycles_per_second))
        ended.record()
        self.sleeps.append((began, ended))

    def calibrate(self, load: Callable[[], object]) -> None:
        """Learn how fast the clock runs while the GPU is busy with ``load()``."""
        if self.stream is None:
            return
        for _ in range(3):
            load()
        torch.cuda.synchronize()
        for _ in range(2):
            load()
        self.sleeps.clear()
        with torch.cuda.stream(self.stream):
            for _ in range(9):
                self._sleep(CALIBRATION_CYCLES / self.cycles_per_second)
        self.cycles_per_second = CALIBRATION_CYCLES / statistics.median(self.take_sleeps())

    def take_sleeps(self) -> list[float]:
        """The delays since the last call, in seconds. Waits for the GPU."""
        if self.stream is not None:
            torch.cuda.synchronize()
        seconds = [began.elapsed_time(ended) / 1e3 for began, ended in self.sleeps]
        self.sleeps.clear()
        return seconds


@torch.no_grad()
def arrive(sent: Sequence[Tensor], aside: dict[int, Tensor], finish: Finish) -> None:
    """What was not taken away is read now: whoever writes to it early changes the result."""
    finish([aside.get(tensor.data_ptr(), tensor) for tensor in sent])


class LateWork:
    """A work of torch.distributed. ``held`` lives until the first `wait`."""

    def __init__(
        self, held: Any, over: Any = None, arrive: Callable[[], object] | None = None
    ) -> None:
        self._held = held
        self._over = over
        self._arrive = arrive

    def wait(self, *args: Any) -> bool:
        if self._over is not None:
            torch.cuda.current_stream().wait_event(self._over)
        elif self._arrive is not None:
            self._arrive()
            self._arrive = None
        self._held = None
        return True

    def is_completed(self) -> bool:
        return bool(self._over.query()) if self._over is not None else self._arrive is None


class DelayedGroup:
    """The process group of the only rank, over ``wire``."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def _get_backend(self, device: torch.device) -> DelayedGroup:
        return self

    def start(self, kind: str, op: Any, sent: Any, output: Any, how: Compute) -> LateWork:
        several = isinstance(sent, list)
        sources, targets = (sent, output) if several else ([sent], [output])
        num_bytes = sum(tensor.nbytes for tensor in sources) * (1 if kind in WHOLE else 0.5)
        return self.wire.carry(
            sources,
            targets,
            num_bytes,
            lambda copies: how([copies if several else copies[0]], [output]),
        )


def ring_over(wire: Wire) -> NCCLCommunicator:
    host = ThreadCommunicator(ThreadWorld(1), 0, WaitPolicy())
    backend = NCCLCommunicator if wire.stream is not None else CPUTensorsOverNCCL
    return backend(DelayedGroup(wire), host)  # type: ignore[arg-type]


# -- numbers of a small model


def small(
    device: str,
    algorithm: Callable[[], Averaging | Sharded],
    *,
    recorded: bool = False,
    compressed: bool = False,
    accumulates: bool = False,
) -> Found:
    """Training over a slow wire, beside one process; with a compressor beside a wire that is none.

    ``recorded``: with a listener, as the monitor is one.
    """

    def over(wire: Wire) -> dict[str, Tensor]:
        comm: Communicator = ring_over(wire)
        if recorded:
            comm = RecordedCommunicator(comm, [lambda record: None])
        return train(comm, net, device, algorithm(), make, accumulates=accumulates, clips=True)

    net = net_of(torch.float32 if compressed else torch.float64)
    make = partial(SGD, lr=0.1) if compressed else partial(AdamW, lr=0.01)
    expected = (
        over(Wire(device, 0))
        if compressed
        else train(None, net, device, None, make, accumulates=accumulates, clips=True)
    )
    found = over(Wire(device, SLOW))
    largest = 0.0
    for name, values in found.items():
        largest = worse(largest, float((values - expected[name]).abs().max()))
    return largest, 1e-6 if compressed else 1e-12


def small_checks(device: str) -> Iterator[tuple[str, Callable[[], Found]]]:
    ring, sharded = partial(Averaging, bucket_cap_mb=0.02), partial(Sharded, bucket_cap_mb=0.02)
    for name, algorithm in (("ring", ring), ("sharded", sharded)):
        yield f"delayed {name}", partial(small, device, algorithm)
        yield f"delayed {name}, recorded", partial(small, device, algorithm, recorded=True)
        yield f"delayed {name}, accumulation", partial(small, device, algorithm, accumulates=True)
    compressors = COMPRESSORS | {"terngrad": lambda: TernGrad(min_numel=0)}
    for name, make in compressors.items():
        compressing = lambda make=make: Averaging(bucket_cap_mb=0.02, compression=make())  # noqa: E731
        yield (
            f"delayed {name}, recorded",
            partial(small, device, compressing, recorded=True, compressed=True),
        )


# -- ResNet-50


class Contender:
    """A way to train a copy of ``model``. ``plain`` sends nothing."""

    def __init__(self, name: str, model: nn.Module, wire: Wire, device: str) -> None:
        self.name = name
        self.model = copy.deepcopy(model)
        self.optimizer = SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.algorithm: Averaging | Sharded | None = None
        self._called = self.model
        self._device = device
        self._num_steps = 0
        if name == "ddp":
            self._called = DistributedDataParallel(
                self.model,
                device_ids=[0] if device == "cuda" else None,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
            )
            self._called.register_comm_hook(DelayedGroup(wire), carried_by_ddp)
        elif name != "plain":
            self.algorithm = Averaging() if name == "ring" else Sharded()
            self.algorithm.attach(self.model, [self.optimizer], ring_over(wire))
            if isinstance(self.algorithm, Sharded):
                self.algorithm.overlaps = True

    def step(self, data: Sequence[tuple[Tensor, Tensor]]) -> None:
        inputs, labels = data[self._num_steps % len(data)]
        self._num_steps += 1
        if (algorithm := self.algorithm) is None:
            self._loss(inputs, labels).backward()
            self.optimizer.step()
        else:
            algorithm.begin_batch()
            with algorithm.forward():
                loss = self._loss(inputs, labels)
            with algorithm.backward():
                loss.backward()
            algorithm.before_step(self.optimizer, has_closure=False)
            self.optimizer.step()
            algorithm.after_step(self.optimizer)
        self.optimizer.zero_grad()

    def _loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        mixed: AbstractContextManager[Any] = (
            torch.autocast("cuda", torch.bfloat16) if self._device == "cuda" else nullcontext()
        )
        with mixed:
            return nn.functional.cross_entropy(self._called(inputs), labels)

    def parameters(self) -> Tensor:
        if self.algorithm is not None:
            self.algorithm.wait_parameters()
        return torch.cat([param.detach().flatten() for param in self.model.parameters()])


def carried_by_ddp(group, bucket):
    """A future records an event on the stream on which it gets its result; DDP has its own stream
    wait for that.

    torch compares annotations with types, and here they would be strings.
    """
    flat = bucket.buffer()
    average = dist.ReduceOp.AVG
    work = FakeDistributed().all_reduce(flat, op=average, group=group, async_op=True)
    if not flat.is_cuda:
        work.wait()
        future = torch.futures.Future()
        future.set_result(flat)
        return future
    future = torch.futures.Future(devices=[flat.device])
    with torch.cuda.stream(group.wire.stream):
        future.set_result(flat)
    return future


class Study:
    """ResNet-50 on a GPU, or a few layers; all contenders begin with the same parameters."""

    def __init__(self, device: str, batch: int, *, tiny: bool) -> None:
        torch.manual_seed(0)
        self.device = device
        if tiny:
            model: nn.Module = net_of(torch.float32)
            shape, num_classes = (24, 3, 8, 8), 5
        else:
            from torchvision.models import resnet50

            model, shape, num_classes = resnet50(), (batch, 3, 224, 224), 1000
        self._model = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.wire = Wire(device, BANDWIDTHS[0])
        self.data = []
        for _ in range(2):
            inputs = torch.randn(shape, device=device).to(memory_format=torch.channels_last)
            labels = torch.randint(num_classes, (shape[0],), device=device)
            self.data.append((inputs, labels))
        self.contenders: dict[str, Contender] = {}

    def checks(self) -> Iterator[tuple[str, Callable[[], Found]]]:
        """The first steps of each contender, against those of ``plain``. One that raises an error
        is not timed.

        cuDNN is asked for the same bits every time. Not all operators have them: another ``plain``
        shows by how much steps differ.
        """
        torch.backends.cudnn.deterministic = True
        expected = self._first_steps("plain")
        noise = float((self._first_steps("plain") - expected).abs().max())

        def differs(name: str) -> Found:
            found = self._first_steps(name)
            assert found.isfinite().all(), "a parameter is not finite"
            return float((found - expected).abs().max()), max(10 * noise, 1e-7)

        for name in ("ddp", "ring", "sharded"):
            yield f"{name} trains as plain does", partial(differs, name)
        torch.backends.cudnn.deterministic = False

    def _first_steps(self, name: str) -> Tensor:
        contender = Contender(name, self._model, self.wire, self.device)
        for _ in range(CHECKED_STEPS):
            contender.step(self.data)
        self.contenders[name] = contender
        return contender.parameters()

    def finite(self, name: str) -> Found:
        return float((~self.contenders[name].parameters().isfinite()).sum()), 0.0

    def turn(self, name: str, steps: int) -> tuple[float, float, float]:
        """Seconds of a step, of the wire in it, and of the host in it."""
        contender = self.contenders[name]
        contender.step(self.data)  # in which it waits for nobody else's collectives
        began = self._now()
        self.wire.sleeps.clear()
        called = time.perf_counter()
        for _ in range(steps):
            contender.step(self.data)
        returned = time.perf_counter()
        ended = self._now()
        slept = sum(self.wire.take_sleeps())
        seconds = ended - began if self.device == "cpu" else began.elapsed_time(ended) / 1e3
        return seconds / steps, slept / steps, (returned - called) / steps

    def _now(self) -> Any:
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def rows(
        self, gb_s: float, *, rounds: int, steps: int, until: float
    ) -> Iterator[dict[str, Any]]:
        """A row for each contender, of the rounds that began before ``until``."""
        self.wire.gb_s, self.wire.strict = gb_s, False
        plain = self.contenders["plain"]
        self.wire.calibrate(lambda: plain.step(self.data))
        names = list(self.contenders)
        turns: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
        for number in range(rounds):
            if number and time.monotonic() > until:
                break
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                turns[name].append(self.turn(name, steps))
        exposed = {
            name: statistics.median(
                turn[0] - alone[0] for turn, alone in zip(turns[name], turns["plain"], strict=True)
            )
            for name in names
        }
        of_ddp = exposed.get("ddp", 0.0)
        for name in names:
            step, wire, host = map(statistics.median, zip(*turns[name], strict=True))
            found = {"step_ms": step, "exposed_ms": exposed[name], "wire_ms": wire, "host_ms": host}
            yield {
                "gb_s": gb_s,
                "contender": name,
                **{key: round(1e3 * value, 3) for key, value in found.items()},
                "of_ddp": round(exposed[name] / of_ddp, 3) if of_ddp > 0 else None,
                "rounds": len(turns[name]),
                "clock_ghz": round(self.wire.cycles_per_second / 1e9, 3),
            }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.delayed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, two rounds")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5, help="that are timed in a turn")
    parser.add_argument("--seconds", type=float, default=65, help="after which no round begins")
    asked = parser.parse_args(arguments)
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("no NVIDIA GPU that torch can use on this machine", file=sys.stderr)
        return NO_GPU
    began, failed = time.monotonic(), False

    def report(checks: Iterator[tuple[str, Callable[[], Found]]]) -> None:
        nonlocal failed
        for name, check in checks:
            found = row(name, check)
            failed |= not found["ok"]
            print(json.dumps(found), flush=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl, "dist", FakeDistributed())
        torch.backends.cudnn.deterministic = True
        report(small_checks(asked.device))
        dist.init_process_group(
            "nccl" if asked.device == "cuda" else "gloo",
            store=dist.TCPStore("127.0.0.1", 0, 1, is_master=True),
            rank=0,
            world_size=1,
        )
        study = Study(asked.device, asked.batch, tiny=asked.tiny)
        report(study.checks())
        torch.backends.cudnn.benchmark = True
        rounds, steps = (2, 2) if asked.tiny else (asked.rounds, asked.steps)
        for index, gb_s in enumerate(BANDWIDTHS, 1):
            share = asked.seconds * (0.4 + 0.2 * index)  # of the time, until this one ends
            for found in study.rows(gb_s, rounds=rounds, steps=steps, until=began + share):
                print(json.dumps(found), flush=True)
        report(
            (f"{name} is finite at the end", partial(study.finite, name))
            for name in study.contenders
        )
    dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
