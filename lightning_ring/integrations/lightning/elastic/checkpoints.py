"""Checkpoints of an elastic fit: in memory, to enter it again, and on disk."""

from __future__ import annotations

import copy
import hashlib
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import numpy
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ModelPruning, ProgressBar
from torch import Tensor, nn

from lightning_ring.comm.communicator import Communicator, Work
from lightning_ring.elastic.membership import JobEnded
from lightning_ring.errors import CollectiveError, StateLostError
from lightning_ring.integrations.lightning.checkpoints import count_trained_batches
from lightning_ring.job.exit import say

if TYPE_CHECKING:
    from lightning_ring.integrations.lightning.elastic.fit import ElasticFit
    from lightning_ring.integrations.lightning.elastic.strategy import ElasticStrategy

CHUNK_BYTES = 64 * 2**20  # sent at once
_KEY = "lightning_ring_elastic"
_STATES = "optimizer_states"
_COPIED_BY_OTHERS = ("state_dict", _STATES)
_LOGGED = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
# of ModelCheckpoint: the monotonic clock's time, by which rank 0 decides
_OF_ONE_HOST = ("_last_time_checked",)


class MemoryCheckpoint:
    """What ``trainer.save_checkpoint`` would write, as files in this process's memory.

    Optimizer states have a file of their own, which lives as long as these tensors.
    """

    def __init__(self) -> None:
        self._files = {key: os.memfd_create(f"lightning_ring {key}") for key in (_STATES, "rest")}

    @property
    def path(self) -> str:
        return _path_of(self._files["rest"])

    def load(self) -> dict[str, Any]:
        """The checkpoint. Copy tensors to keep them, except the states of optimizers."""
        rest = _load(self.path)
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            states = _load(_path_of(self._files[_STATES]))
        return {**rest, _STATES: states}

    def send(
        self, comm: Communicator, device: torch.device, checkpoint: dict[str, Any] | None = None
    ) -> None:
        """Replace the files by rank 0's. Collective.

        Args:
            comm: Carries tensors on ``device``.
            checkpoint: On rank 0, to be written first, unless this object has one already.
        """
        states, rest = None, None
        if checkpoint is not None:
            rest = {key: value for key, value in checkpoint.items() if key != _STATES}
            states = checkpoint[_STATES]
        with _without_checksums():
            for content, file in zip((states, rest), self._files.values(), strict=True):
                size = os.fstat(file).st_size if content is None else _num_bytes(content)
                size = comm.broadcast_object(size, name="checkpoint in memory")
                os.ftruncate(file, size)
                sending = _Sending(mmap.mmap(file, size), comm, device)
                if content is not None:
                    torch.save(content, sending)  # type: ignore[arg-type]
                sending.finish()
                self._check_pickle(file, comm)

    def _check_pickle(self, file: int, comm: Communicator) -> None:
        """Compare the part that is unpickled with rank 0's: these bytes are not sealed.
        Collective."""
        pickled = torch._C.PyTorchFileReader(_path_of(file)).get_record("data.pkl")
        digest = hashlib.sha256(pickled).digest()
        if comm.broadcast_object(digest, name="checkpoint in memory") != digest:
            raise CollectiveError("The checkpoint in memory is not the one that rank 0 has sent.")

    def __del__(self) -> None:
        for file in self._files.values():
            os.close(file)


class _Sending:
    """A file that rank 0 writes into ``memory``, and sends to all ranks meanwhile. Collective."""

    def __init__(self, memory: mmap.mmap, comm: Communicator, device: torch.device) -> None:
        self._comm, self._device = comm, device
        self._memory = numpy.frombuffer(memory, dtype=numpy.uint8)
        self._unsent = deque(torch.from_numpy(self._memory).split(CHUNK_BYTES))
        self._under_way: deque[tuple[Work, Tensor, Tensor]] = deque()
        self._num_written = self._num_sent = 0

    def write(self, data: bytes) -> int:
        for first in range(0, len(data), CHUNK_BYTES):
            part = numpy.frombuffer(data, dtype=numpy.uint8)[first : first + CHUNK_BYTES]
            end = self._num_written + len(part)
            self._memory[self._num_written : end] = part
            self._num_written = end
            while self._num_written - self._num_sent >= CHUNK_BYTES:
                self._send_next()
        return len(data)

    def flush(self) -> None:
        """A file has it."""

    def finish(self) -> None:
        while self._unsent:
            self._send_next()
        while self._under_way:
            self._receive()

    def _send_next(self) -> None:
        if len(self._under_way) == 2:
            self._receive()
        part = self._unsent.popleft()
        sent = part.to(self._device)
        work = self._comm.broadcast_(sent, name="checkpoint in memory")
        self._under_way.append((work, part, sent))
        self._num_sent += len(part)

    def _receive(self) -> None:
        work, part, sent = self._under_way.popleft()
        work.wait()
        if sent is not part and self._comm.rank != 0:
            part.copy_(sent)


class _Counting:
    num_bytes = 0

    def write(self, data: bytes) -> int:
        self.num_bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """A file has it."""


def _num_bytes(content: Any) -> int:
    counting = _Counting()
    torch.save(content, counting)  # type: ignore[arg-type]
    return counting.num_bytes


def _path_of(file: int) -> str:
    return f"/proc/self/fd/{file}"


def _load(path: str) -> Any:
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)


@contextmanager
def _without_checksums() -> Iterator[None]:
    """Checksums would take as long as all the rest."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def dump_fit(strategy: ElasticStrategy, fit: ElasticFit, comm: Communicator) -> dict[str, Any]:
    """The checkpoint of the fit between two steps; if sharded, whole on rank 0. Collective.

    It adds what a resumed fit would not find again.
    """
    trainer, model = strategy.fit_trainer, strategy.fit_model
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    assert fit.step.position is not None
    checkpoint[_KEY] = {
        "attributes": _changed_on_all(fit.first_attributes, trainer, comm),
        "logged": {name: dict(getattr(trainer._logger_connector, name)) for name in _LOGGED},
        "position": fit.step.position.state_dict(),
        "buffers": strategy.buffers_state,
        "rank_changes": strategy.rank_changes.state_dict(),
        "learning_rates_for": fit.resize.num_ranks,
        "trained": [param.requires_grad for param in model.parameters()],
        "modes": [_modes(module) for module in model.modules()],
    }
    return checkpoint


class RestOfCheckpoint:
    """What `dump_fit` adds to Lightning's checkpoint.

    Attributes:
        of_lightning: That checkpoint.
        position: In the training data.
        learning_rates_for: The number of ranks for which the learning rates are.
    """

    def __init__(self, checkpoint: dict[str, Any]) -> None:
        # a reference would keep the whole file
        copied = {
            key: value if key in _COPIED_BY_OTHERS else copy.deepcopy(value)
            for key, value in checkpoint.items()
        }
        self._found: dict[str, Any] = copied.pop(_KEY)
        self.of_lightning = copied
        self.position: dict[str, Any] = self._found["position"]
        self.learning_rates_for: int = self._found["learning_rates_for"]

    def restore_attributes(self, trainer: pl.Trainer, first: list[dict[str, Any]]) -> None:
        """Before any hook is called: hooks may communicate depending on them.

        The Trainer's are the ``first`` ones again.
        """
        take_attributes(trainer, [first[0], *self._found["attributes"][1:]])

    def restore_flags(self, model: nn.Module) -> None:
        """With the weights, before buckets are made."""
        for param, trains in zip(model.parameters(), self._found["trained"], strict=True):
            param.requires_grad_(trains)
        for module, modes in zip(model.modules(), self._found["modes"], strict=True):
            vars(module).update(modes)

    def restore(self, strategy: ElasticStrategy) -> None:
        trainer, found = strategy.fit_trainer, self._found
        vars(trainer).update(found["attributes"][0])
        for name, metrics in found["logged"].items():
            getattr(trainer._logger_connector, name).update(metrics)
        strategy.buffers_state = found["buffers"]
        strategy.rank_changes.load_state_dict(found["rank_changes"])


def _modes(module: nn.Module) -> dict[str, Any]:
    """Flags that finetuning changes."""
    names = [name for name in ("training", "track_running_stats") if hasattr(module, name)]
    return {name: getattr(module, name) for name in names}


def plain_attributes(trainer: pl.Trainer) -> list[dict[str, Any]]:
    """Copies of plain values in the attributes of each part of the fit.

    Private attributes of trainer, module and data module are Lightning's.
    """
    return [
        {
            name: copy.deepcopy(value)
            for name, value in vars(part).items()
            if (private or name[0] != "_") and name not in _OF_ONE_HOST and _is_plain(value)
        }
        for part, private in _parts(trainer)
    ]


def take_attributes(trainer: pl.Trainer, parts: list[dict[str, Any]]) -> None:
    for (part, _), values in zip(_parts(trainer), parts, strict=True):
        vars(part).update(copy.deepcopy(values))


def _changed_on_all(
    first: list[dict[str, Any]], trainer: pl.Trainer, comm: Communicator
) -> list[dict[str, Any]]:
    """The attributes that training has changed, equally on all ranks. Collective.

    ``first`` are those with which it began.
    """
    changed = [
        {name: value for name, value in part.items() if name not in before or before[name] != value}
        for part, before in zip(plain_attributes(trainer), first, strict=True)
    ]
    texts = [{name: repr(value) for name, value in part.items()} for part in changed]
    of_all: list[list[dict[str, str]]] = comm.all_gather_object(texts)
    return [
        {
            name: value
            for name, value in part.items()
            if all(of_rank[at].get(name) == repr(value) for of_rank in of_all)
        }
        for at, part in enumerate(changed)
    ]


def user_callbacks(trainer: pl.Trainer) -> Sequence[Callback]:
    """Without those of this package."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [one for one in callbacks if not type(one).__module__.startswith("lightning_ring.")]


def _parts(trainer: pl.Trainer) -> list[tuple[Any, bool]]:
    data = getattr(trainer, "datamodule", None)
    public = [trainer, trainer.lightning_module, *([data] if data is not None else [])]
    private = [one for one in user_callbacks(trainer) if not isinstance(one, ProgressBar)]
    return [*((part, False) for part in public), *((part, True) for part in private)]


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return value is None or type(value) in (bool, int, float, str)


MOST_ENTRIES = 3  # from one checkpoint: the fit does not get beyond it


def save_last_checkpoint(strategy: ElasticStrategy, number: int) -> Path:
    """Save the fit beside its other checkpoints, on any rank: all hold the same."""
    trainer = strategy.fit_trainer
    callback = trainer.checkpoint_callback
    folder = callback.dirpath if isinstance(callback, ModelCheckpoint) else None
    path = (
        Path(folder or trainer.default_root_dir) / f"too-few-ranks-step={trainer.global_step}.ckpt"
    )
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    count_trained_batches(checkpoint, trainer)
    own = path.with_name(f"{path.name}.{number}")
    strategy.checkpoint_io.save_checkpoint(checkpoint, own)
    os.replace(own, path)
    return path


def save_at_the_end(
    strategy: ElasticStrategy, fit: ElasticFit, take_back: Callable[[], None]
) -> None:
    """Save what this rank has finished, when the job ends with too few ranks.

    ``take_back`` undoes the step under way.
    """
    number = fit.process.member.number
    sharded, view = strategy.algorithm.sharded, fit.recovery.view
    if sharded and (view is None or not view.last):
        hint = where_to_go_on(newest_checkpoint(strategy.fit_trainer, fit.given))
        say(f"process {number} saves no checkpoint: it has a part of the optimizer's state. {hint}")
        return
    take_back()
    with strategy.whole_optimizer_states() if sharded else nullcontext():
        path = save_last_checkpoint(strategy, number)
    say(f"process {number} saved a checkpoint: go on from it with ckpt_path={str(path)!r}")


def newest_of_rank_zero(
    strategy: ElasticStrategy, fit: ElasticFit, error: StateLostError, comm: Communicator
) -> str:
    """Rank 0's newest checkpoint, after a shard was lost. Collective.

    Raises:
        JobEnded: The job ends with this view anyway.
        StateLostError: There is no checkpoint, or the fit does not get beyond it.
    """
    trainer, view = strategy.fit_trainer, fit.recovery.view
    path = newest_checkpoint(trainer, fit.given)
    version = os.stat(path).st_mtime_ns if path is not None else 0
    path, version, hint = comm.broadcast_object((path, version, where_to_go_on(path)))
    if view is not None and view.last:
        raise JobEnded(
            f"The job ends: {view.last}. No checkpoint could be saved: {error} {hint}"
        ) from error
    if path is None:
        raise StateLostError(f"{error} {hint}") from None
    if any(isinstance(one, ModelPruning) for one in trainer.callbacks):  # type: ignore[attr-defined]
        # its masks are in the model, and set-up cannot copy it
        raise StateLostError(f"{error} A fit with ModelPruning is not entered again. {hint}")
    if fit.process.count_entries(path, version) > MOST_ENTRIES:
        raise StateLostError(
            f"{error} All ranks have gone on {MOST_ENTRIES} times from {path}, and lost their "
            "state before the next checkpoint."
        ) from None
    if comm.rank == 0:
        say(f"{error} All ranks go on from {path}")
    return path


def newest_checkpoint(trainer: pl.Trainer, given: Any) -> str | None:
    """The newest file that the fit has saved; else ``given``, if that is a file."""
    callbacks = [
        callback
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint)
    ]
    whole = [callback for callback in callbacks if not callback.save_weights_only]
    saved = [
        path
        for one in whole
        for path in (one.last_model_path, one.best_model_path, *one.best_k_models)
    ]
    there = [path for path in saved if os.path.isfile(path)]
    if there:
        return max(there, key=os.path.getmtime)
    return str(given) if given and os.path.isfile(given) else None


def where_to_go_on(newest: str | None) -> str:
    """A sentence for a job that has lost its state."""
    if newest is None:
        return "The fit has saved no checkpoint: start the job again."
    return (
        f"Start the job again from its newest checkpoint: trainer.fit(..., ckpt_path={newest!r})."
    )
