"""A classification head whose classes are spread over the ranks: partial FC."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ring.algorithms.sharded.elementwise import check_can_be_sharded
from lightning_ring.comm.communicator import Communicator, ReduceOp, shard_bounds
from lightning_ring.errors import ConfigurationError
from lightning_ring.optim import LAMB, LARS
from lightning_ring.retrieval import gather_rows, row_counts

Margin = Literal["none", "cosface", "arcface"]
BLOCK = 1024  # classes whose first weights come from one generator, and rows that travel at a time
KEY = "sharded_head"


class ShardedHead(nn.Module):
    """Softmax over ``num_classes``, of which each rank holds an equal share: its weights, logits
    and optimizer state.

    An et al., "Partial FC: Training 10 million identities on a single machine", ICCVW 2021. The
    embeddings of all ranks are gathered, each rank computes the logits of its classes for all of
    them, and the softmax runs over the ranks: its greatest logit, its sum and the target's logit
    are reduced, three numbers an image. The loss is the mean over the batch of all ranks, and equal
    to that of one process to rounding.

    A rank's weights are no parameter of the module: a strategy averages parameters over ranks and
    broadcasts rank 0's, and these belong to one rank alone. Their gradient is complete without the
    other ranks. So the head has an optimizer of its own (`set_optimizer`, `step`), and checkpoints
    get the whole (`state`, `load`), for any number of ranks.

    Args:
        num_classes, embedding_size: Of all ranks; length of an embedding.
        margin: Subtracted from the target's cosine (``"cosface"``, Wang et al. 2018) or added to
            its angle (``"arcface"``, Deng et al. 2019).
        size: Of the margin: a cosine, or degrees.
        scale: Logits are cosines times this.
        sample_rate: Share of its classes that a rank compares a batch with: those of the batch, and
            others drawn anew for each batch. 1 for all.
        seed: Of the first weights, which do not depend on the number of ranks.
    """

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        margin: Margin = "none",
        size: float = 0.0,
        scale: float = 64.0,
        sample_rate: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if margin not in ("none", "cosface", "arcface") or not 0 < sample_rate <= 1:
            raise ConfigurationError(
                f"margin={margin} and sample_rate={sample_rate} were given, expected none, cosface "
                "or arcface, and a share in (0, 1]."
            )
        self.num_classes, self.embedding_size = num_classes, embedding_size
        self.margin, self.size, self.scale = margin, size, scale
        self.sample_rate, self.seed = sample_rate, seed
        self.comm: Communicator | None = None
        self.first, self.last = 0, num_classes  # of the classes, this rank's
        # of this rank's classes; allocated when the ranks are known
        self.weight: Tensor | None = None
        self.optimizer: Optimizer | None = None
        self._loaded_optimizer: dict[str, Any] | None = None

    # -- ranks

    def join(self, comm: Communicator | None, device: torch.device | str = "cpu") -> None:
        """Take this rank's classes. ``comm``: ``None`` for one process, whose weights can be shared
        out afterwards.
        """
        first, last = 0, self.num_classes
        if comm is not None:
            first, last = shard_bounds(self.num_classes, comm.world_size, comm.rank)
        if self.weight is None:
            self.weight = self._first_weights(first, last).to(device).requires_grad_()
        elif len(self.weight) == self.num_classes:
            self.weight = self.weight.detach()[first:last].clone().to(device).requires_grad_()
        else:
            assert (first, last) == (self.first, self.last), "the number of ranks has changed"
        self.comm, self.first, self.last = comm, first, last

    def _first_weights(self, first: int, last: int) -> Tensor:
        blocks = []
        for block in range(first // BLOCK, -(-last // BLOCK)):
            rows = torch.arange(block * BLOCK, (block + 1) * BLOCK)
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + block)
            drawn = torch.randn(BLOCK, self.embedding_size, generator=generator) * 0.01
            blocks.append(drawn[(rows >= first) & (rows < last)])
        return torch.cat(blocks) if blocks else torch.empty(0, self.embedding_size)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ShardedHead:
        super()._apply(fn, recurse)
        if self.weight is not None:
            with torch.no_grad():
                self.weight.data = fn(self.weight.data)
        return self

    # -- loss

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy over the images of all ranks, the same on each; all have equally many.

        The gradient of ``embeddings`` is times the number of ranks, because the strategy takes the
        mean over ranks.
        """
        with torch.autocast(embeddings.device.type, enabled=False):
            rows, targets = _wide(embeddings), labels.long()
            if self.comm is not None:
                rows = GatheredRows.apply(rows, self.comm)
                targets = torch.cat(self.comm.all_gather(targets, name="labels"))
            least, most = map(int, targets.aminmax())
            if least < 0 or most >= self.num_classes:
                raise ConfigurationError(
                    f"the labels of a batch are from {least} to {most}, but the head has "
                    f"{self.num_classes} classes. Set num_classes to those of the data."
                )
            weight, columns, mine = self._classes(targets)
            logits = self._cosines(rows, weight)
            own = logits[mine, columns]
            logits = logits.index_put((mine, columns), self._with_margin(own)) * self.scale
            target = logits.new_zeros(len(targets)).index_put((mine,), logits[mine, columns])
            return self._cross_entropy(logits, target)

    def _classes(self, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights of the classes to compare with; the targets' places in them; the images whose
        targets they are.
        """
        assert self.weight is not None, "join() comes first"
        mine = ((targets >= self.first) & (targets < self.last)).nonzero().squeeze(1)
        local = targets[mine] - self.first
        if self.sample_rate == 1 or not self.training:
            return self.weight, local, mine
        num_local = self.last - self.first
        rank_of = torch.rand(num_local, device=targets.device)
        rank_of[local] = -1  # the batch's classes come first
        num = max(math.ceil(self.sample_rate * num_local), len(local.unique()))
        chosen = rank_of.topk(num, largest=False).indices.sort().values
        return self.weight[chosen], torch.searchsorted(chosen, local), mine

    @staticmethod
    def _cosines(rows: Tensor, weight: Tensor) -> Tensor:
        return F.normalize(rows) @ F.normalize(weight.to(rows.dtype)).T

    def _with_margin(self, cosine: Tensor) -> Tensor:
        if self.margin == "cosface":
            return cosine - self.size
        if self.margin == "none":
            return cosine
        size = math.radians(self.size)
        angle = cosine.clamp(-1 + 1e-7, 1 - 1e-7).acos()
        # past 180 degrees the cosine would rise again: go on downwards
        return torch.where(
            angle <= math.pi - size, (angle + size).cos(), cosine - size * math.sin(size)
        )

    def _cross_entropy(self, logits: Tensor, target: Tensor) -> Tensor:
        if logits.shape[1]:
            greatest = logits.detach().amax(1)
        else:  # more ranks than classes
            greatest = logits.new_full((len(logits),), -torch.inf)
        if self.comm is not None:
            self.comm.all_reduce_(greatest, op=ReduceOp.MAX, name="greatest logits").wait()
        sums = torch.stack([(logits - greatest[:, None]).exp().sum(1), target])
        if self.comm is not None:
            sums = SumOverRanks.apply(sums, self.comm)
        total, target = sums
        return (total.log() + greatest - target).mean()

    @torch.no_grad()
    def predict(self, embeddings: Tensor) -> Tensor:
        """The class of each embedding, of all classes. Collective; ranks may have different
        numbers of embeddings.
        """
        if self.comm is None:
            return self._best(embeddings)[1]
        counts = row_counts(embeddings, self.comm.all_gather)
        score, label = self._best(gather_rows(_wide(embeddings), self.comm.all_gather))
        scores = torch.stack(self.comm.all_gather(score, name="scores"))
        labels = torch.stack(self.comm.all_gather(label, name="classes"))
        best = labels.gather(0, scores.argmax(0, keepdim=True)).squeeze(0)
        start = sum(counts[: self.comm.rank])
        return best[start : start + len(embeddings)]

    def _best(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Highest cosine with this rank's classes, and which class has it."""
        assert self.weight is not None, "join() comes first"
        if self.first == self.last:
            return rows.new_full((len(rows),), -2.0), rows.new_zeros(len(rows), dtype=torch.long)
        best = self._cosines(_wide(rows), self.weight).max(1)
        return best.values, best.indices + self.first

    # -- steps

    def set_optimizer(self, make: Callable[[list[Tensor]], Optimizer]) -> None:
        """Build the optimizer of this rank's weights.

        Raises `ConfigurationError`: it looks at whole tensors, of which a rank has a part.
        """
        assert self.weight is not None, "join() comes first"
        self.optimizer = make([self.weight])
        if isinstance(self.optimizer, (LARS, LAMB)):
            raise ConfigurationError(
                f"{type(self.optimizer).__name__} scales steps by the norm of a whole tensor, and "
                "each rank has a part of the head. Choose optimizer=sgd or optimizer=adamw."
            )
        check_can_be_sharded(self.optimizer)
        if self._loaded_optimizer is not None:
            self._restore_optimizer(self._loaded_optimizer)
            self._loaded_optimizer = None

    def step(self, lr: float) -> None:
        """Step with the learning rate ``lr``, and forget the gradient."""
        assert self.optimizer is not None, "set_optimizer() comes first"
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()

    # -- checkpoints

    def state(self) -> dict[str, Any]:
        """Weights and optimizer state of all classes, on rank 0; ``{}`` elsewhere. Collective."""
        assert self.weight is not None, "join() comes first"
        held = self.optimizer.state.get(self.weight, {}) if self.optimizer is not None else {}
        whole = {
            name: self._collected(value)
            for name, value in sorted(held.items())
            if isinstance(value, Tensor) and value.shape == self.weight.shape
        }
        weight = self._collected(self.weight.detach())
        if self.comm is not None and self.comm.rank != 0:
            return {}
        rest = {name: copy.deepcopy(value) for name, value in held.items() if name not in whole}
        return {"weight": weight, "optimizer": rest | whole}

    def load(self, state: dict[str, Any]) -> None:
        """Take this rank's classes out of `state`'s result of any number of ranks.

        Raises `ConfigurationError`: it is of other classes, or of embeddings of another length.
        """
        expected = (self.num_classes, self.embedding_size)
        if tuple(state["weight"].shape) != expected:
            raise ConfigurationError(
                f"the checkpoint's head has {tuple(state['weight'].shape)} classes and numbers a "
                f"class, but the model's {expected}. Build the model as it was trained."
            )
        if self.weight is None:
            self.join(None)
        assert self.weight is not None
        with torch.no_grad():
            self.weight.copy_(state["weight"][self.first : self.last])
        self._loaded_optimizer = state["optimizer"]
        if self.optimizer is not None:
            self._restore_optimizer(state["optimizer"])

    def _restore_optimizer(self, held: dict[str, Any]) -> None:
        assert self.weight is not None
        assert self.optimizer is not None
        whole = (self.num_classes, self.embedding_size)
        for name, value in held.items():
            if isinstance(value, Tensor) and tuple(value.shape) == whole:
                mine = value[self.first : self.last].to(self.weight.device, copy=True)
            else:  # a step counter is a tensor too, and is counted up in place
                mine = copy.deepcopy(value)
            self.optimizer.state[self.weight][name] = mine

    def _collected(self, part: Tensor) -> Tensor:
        """The rows of all ranks on rank 0's CPU, `BLOCK` at a time; elsewhere something shorter."""
        if self.comm is None:
            return part.cpu().clone()
        world_size = self.comm.world_size
        shares = [shard_bounds(self.num_classes, world_size, rank) for rank in range(world_size)]
        whole = torch.empty(
            self.num_classes if self.comm.rank == 0 else 0, *part.shape[1:], dtype=part.dtype
        )
        longest = max(last - first for first, last in shares)
        for start in range(0, longest, BLOCK):
            block = part.new_zeros(min(BLOCK, longest - start), *part.shape[1:])
            mine = part[start : start + len(block)]
            block[: len(mine)] = mine
            rows = self.comm.all_gather(block, name="head")
            if self.comm.rank != 0:
                continue
            for (first, last), others in zip(shares, rows, strict=True):
                stop = min(first + start + len(block), last)
                whole[first + start : stop] = others[: max(0, stop - first - start)].cpu()
        return whole


def _wide(values: Tensor) -> Tensor:
    """In float32 at least: a softmax over so many classes needs it."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


# -- exchanges between ranks that gradients pass through


class GatheredRows(torch.autograd.Function):
    """The rows of all ranks, one rank after another; all have equally many. For a loss whose parts
    lie on the ranks.

    Backward sums the ranks' gradients and multiplies by their number, because the strategy takes
    the mean of what follows.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, comm: Communicator) -> Tensor:
        ctx.comm, ctx.num = comm, len(rows)
        return torch.cat(comm.all_gather(rows.contiguous(), name="embeddings"))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        comm, num = ctx.comm, ctx.num
        total = gradient.clone(memory_format=torch.contiguous_format)
        comm.all_reduce_(total, name="gradients of embeddings").wait()
        return total[comm.rank * num : (comm.rank + 1) * num] * comm.world_size, None


class SumOverRanks(torch.autograd.Function):
    """Backward hands the gradient on as it is: all ranks compute the same loss of the sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, comm: Communicator) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        comm.all_reduce_(total, name="softmax").wait()
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
