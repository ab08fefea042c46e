"""What a profile measures beside the training: the cost of messages, and of encoding gradients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from lightning_ring.comm.communicator import Communicator, CompletedWork, ReduceOp, Work
from lightning_ring.comm.cost import Collective, CostModel, fit
from lightning_ring.comm.timing import time_collective
from lightning_ring.gradients.compression import COMPRESSORS, Compressor
from lightning_ring.gradients.compression.int8 import FourBit
from lightning_ring.tools.plan.profile import SHORT_BYTES, Questions

PROBE_BYTES = (2**16, 2**18, 2**19, 2**20, 2**22, 2**24)
_COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "reduce_scatter", "all_gather")
_REPEATS = 5
_STEPS, _STEP_SECONDS, _BLOCKS = 20, 5e-3, 3  # of ranks that compute between short all-reduces
_WIDTH = 512
_QUESTION_BYTES = 2**18
_ROUNDS = 5
_ROWS = 1024
_AFTER_WARM_UP = {"dgc": {"warmup_steps": 0}, "powersgd": {"start_iter": 0}}


def measure_collectives(
    comm: Communicator, device: torch.device, sizes: Sequence[int] = PROBE_BYTES
) -> dict[str, CostModel]:
    """What a message costs, by collective, from tensors of ``sizes`` bytes. Collective.

    The largest come first: links of a limited rate (of clouds, of tc) let some of what follows an
    idle moment pass at once, and a training sends at each step.
    """
    flats = [
        comm.empty(size // 4, torch.float32, device).zero_() for size in sorted(sizes, reverse=True)
    ]
    costs: dict[str, CostModel] = {}
    for collective in _COLLECTIVES:
        own = [
            median(time_collective(comm, collective, flat, _REPEATS, "probe of the profile"))
            for flat in flats
        ]
        slowest = [max(times) for times in zip(*comm.all_gather_object(own), strict=True)]
        costs[collective] = fit(
            [flat.nbytes for flat in flats], slowest, comm.world_size, collective=collective
        )
    return costs


def measure_processor(comm: Communicator, size: int = PROBE_BYTES[-2]) -> float:
    """Processor seconds that a byte of an all-reduce of ``size`` bytes costs this rank's
    process. Collective.
    """
    flat, spent = comm.empty(size // 4, torch.float32, torch.device("cpu")).zero_(), []
    for _ in range(1 + _REPEATS):
        comm.barrier()
        began = time.process_time()
        comm.all_reduce_(flat, name="probe of the profile").wait()
        spent.append(time.process_time() - began)
    return median(spent[1:]) / size


def measure_call(comm: Communicator) -> float:
    """Seconds by which a short all-reduce lengthens a step of a few milliseconds on the CPU.
    Collective.

    More than the all-reduce takes alone: its threads wait for cores that compute, and its ranks for
    the slower one.
    """
    flat, matrix = (
        comm.empty(SHORT_BYTES // 4, torch.float32, torch.device("cpu")).zero_(),
        torch.ones(256, 256),
    )

    def seconds_of_a_step(num_steps: int, num_products: int, *, calls: bool) -> float:
        comm.barrier()
        began = time.perf_counter()
        for _ in range(num_steps):
            for _ in range(num_products):
                torch.mm(matrix, matrix)
            if calls:
                comm.all_reduce_(flat, name="probe of the profile").wait()
        return (time.perf_counter() - began) / num_steps

    num_products = max(1, round(_STEP_SECONDS / seconds_of_a_step(_STEPS, 1, calls=False)))
    longer = [
        seconds_of_a_step(_STEPS, num_products, calls=True)
        - seconds_of_a_step(_STEPS, num_products, calls=False)
        for _ in range(_BLOCKS)
    ]
    return max(0.0, *comm.all_gather_object(median(longer)))


def measure_questions(comm: Communicator) -> Questions | None:
    """What questions of 256 KiB, several at once, cost the computation of each even rank, and of
    the odd one it asks.

    Collective. Processor time would miss what the kernel does for a message on behalf of nobody,
    waits for the interpreter, and what the batch loses of the caches. `None` on one rank.
    """
    if comm.world_size == 1:
        return None
    questions, step = (
        [torch.zeros(_QUESTION_BYTES, dtype=torch.uint8) for _ in range(8)],
        _made_up_step(),
    )
    ends = threading.Event()

    def answer(peer: int, question: Tensor) -> Tensor:
        if question.numel() == 1:
            ends.set()
        return question.clone()

    def computed_until(over: Callable[[], bool]) -> tuple[float, int]:
        began, steps = time.perf_counter(), 0
        while not over():
            step()
            steps += 1
        return time.perf_counter() - began, steps

    def computed_while_asking(peer: int) -> tuple[float, int]:
        found = []
        for _ in range(_REPEATS):
            answers = requests.ask({peer: questions}, "probe of the profile")
            found.append(computed_until(answers.done))
            answers.wait()
        requests.ask({peer: questions[0][:1].split(1)}, "end of the probe").wait()
        return sum(seconds for seconds, _ in found), sum(steps for _, steps in found)

    def alone() -> float:
        comm.barrier()
        found = median(_times_of(step))
        comm.barrier()
        return found

    requests = comm.open_requests(answer)
    requests.start()
    partner, lost, before = comm.rank ^ 1, [], alone()
    for _ in range(_BLOCKS):
        seconds, steps = 0.0, 0
        if comm.rank % 2:
            seconds, steps = computed_until(ends.is_set)
            ends.clear()
        elif partner < comm.world_size:
            seconds, steps = computed_while_asking(partner)
        after = alone()
        lost.append(seconds - steps * (before + after) / 2)
        before = after
    requests.close()
    num_bytes = _REPEATS * len(questions) * _QUESTION_BYTES
    own = max(0.0, median(lost)) / num_bytes
    everyones = comm.all_gather_object(own)
    return Questions(asking=max(everyones[::2]), answering=max(everyones[1::2]))


def measure_copying(comm: Communicator, size: int = 2**22) -> float:
    """Seconds of each byte of a float32 tensor, ``size`` bytes long, to which another is added.
    Collective.

    Behind a step, which leaves little of both in the caches.
    """
    total, added, step = torch.zeros(size // 4), torch.zeros(size // 4), _made_up_step()
    times = []
    comm.barrier()
    for _ in range(_STEPS):
        step()
        times += _times_of(lambda: total.add_(added), 1)
    return max(comm.all_gather_object(median(times))) / size


def _made_up_step() -> Callable[[], None]:
    """Of some milliseconds: it needs as much of the interpreter and of the caches as training
    does.
    """
    images, layers = (
        torch.ones(64, _WIDTH),
        [torch.ones(_WIDTH, _WIDTH, requires_grad=True) for _ in range(2)],
    )

    @torch.enable_grad()
    def step() -> None:
        found = images
        for layer in layers:
            found = torch.relu(found @ layer) / _WIDTH
        found.sum().backward()
        with torch.no_grad():
            for layer in layers:
                layer.add_(torch.zeros_like(layer) if layer.grad is None else layer.grad, alpha=0.0)
                layer.grad = None

    return step


def _times_of(call: Callable[[], object], repeats: int = _STEPS) -> list[float]:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


def measure_encoding(comm: Communicator | None, numel: int = _ROWS * _ROWS) -> dict[str, float]:
    """By compressor, seconds that an average costs a rank besides its messages, of each element. On
    the CPU.

    All ranks measure at once, as they encode at once in a training: the slowest one's. Collective.
    """
    made = {
        name: known.build(**_AFTER_WARM_UP.get(name, {})) for name, known in COMPRESSORS.items()
    }
    made[FourBit.name] = FourBit()
    own = {
        name: median(whole for _, whole in times_to_encode(each, numel)) / numel
        for name, each in made.items()
    }
    everyones = comm.all_gather_object(own) if comm is not None else [own]
    return {name: max(each[name] for each in everyones) for name in own}


def times_to_encode(
    compressor: Compressor, numel: int, rounds: int = _ROUNDS
) -> list[tuple[float, float]]:
    """Seconds until ``numel`` gradients have been encoded for sending, and until their average is
    there, by round.

    Of one of two ranks, whose messages take no time. With error feedback, if any; without the copy
    into a bucket, which is all that 16 bits take.
    """
    comm = SilentCommunicator(2)
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    flat = gradient.to(compressor.buffer_dtype or gradient.dtype)
    if compressor.buffer_dtype is None:
        compressor.prepare(flat, OneGradient(flat))
    times = []
    for _ in range(rounds):
        flat.copy_(gradient)
        compressor.begin_backward()
        comm.sent.clear()
        began = time.perf_counter()
        compressor.all_reduce(flat, comm, name="bucket").wait()
        whole = time.perf_counter() - began
        # TernGrad's scalers travel before
        times.append((comm.sent[-2 if len(comm.sent) > 1 else 0] - began, whole))
    return times


class OneGradient:
    """Of ``flat`` as square matrices, as far as it goes."""

    def __init__(self, flat: Tensor) -> None:
        self.views = [
            part.view(-1, _ROWS) if part.numel() % _ROWS == 0 else part
            for part in flat.split(_ROWS * _ROWS)
        ]
        self.names = [str(index) for index in range(len(self.views))]
        self.contributed = [True] * len(self.views)
        self.used = torch.ones(len(self.views))


class SilentCommunicator(Communicator):
    """One of ``world_size`` ranks, whose collectives take no time and bring nothing new.

    Attributes:
        sent: When each of them was called, by `time.perf_counter`.
    """

    def __init__(self, world_size: int) -> None:
        self.rank, self.world_size = 0, world_size
        self.sent: list[float] = []

    def _called(self) -> Work:
        self.sent.append(time.perf_counter())
        return CompletedWork()

    def all_reduce_(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        return self._called()

    def reduce_scatter_(self, flat: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        return self._called()

    def all_gather_(self, flat: Tensor, *, name: str = "") -> Work:
        work = self._called()
        rows = flat.view(self.world_size, -1)
        rows[1:].copy_(rows[:1].expand_as(rows[1:]))
        return work

    def all_to_all(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, name: str = ""
    ) -> Work:
        work = self._called()
        for source, target in zip(inputs, outputs, strict=True):
            target.copy_(source)
        return work

    def broadcast_(self, tensor: Tensor, *, src: int = 0, name: str = "") -> Work:
        return self._called()

    def close(self) -> None:
        return None
